-- The ledger. A leaf is the exact stored bytes; every other column is generated from it.
CREATE TABLE entry (
    idx INTEGER PRIMARY KEY,
    leaf TEXT NOT NULL CHECK (length(leaf) <= 65535),
    run_id TEXT NOT NULL GENERATED ALWAYS AS (json_extract(leaf, '$.run')) VIRTUAL,
    run_seq INTEGER NOT NULL GENERATED ALWAYS AS (json_extract(leaf, '$.seq')) VIRTUAL,
    type TEXT GENERATED ALWAYS AS (json_extract(leaf, '$.type')) VIRTUAL,
    ts_us INTEGER GENERATED ALWAYS AS (json_extract(leaf, '$.ts_us')) VIRTUAL,
    actor TEXT GENERATED ALWAYS AS (json_extract(leaf, '$.actor')) VIRTUAL,
    reason TEXT GENERATED ALWAYS AS (json_extract(leaf, '$.reason')) VIRTUAL
) STRICT;

CREATE UNIQUE INDEX entry_of_run ON entry (run_id, run_seq);

-- Appending is all that the ledger allows; a position or a number that does not follow the last one is refused, so
-- that INSERT OR REPLACE has nothing to replace.
CREATE TRIGGER entry_appends BEFORE INSERT ON entry
BEGIN
    SELECT raise(ABORT, 'the ledger is append-only: a position must follow the last one')
    WHERE new.idx IS NOT (SELECT coalesce(max(idx), -1) + 1 FROM entry);
    SELECT raise(ABORT, 'the ledger is append-only: an entry''s number must follow the last one of its run')
    WHERE new.run_seq IS NOT (SELECT coalesce(max(run_seq), -1) + 1 FROM entry WHERE run_id = new.run_id);
END;

CREATE TRIGGER entry_never_changes BEFORE UPDATE ON entry
BEGIN
    SELECT raise(ABORT, 'the ledger is append-only: an entry never changes');
END;

CREATE TRIGGER entry_never_goes BEFORE DELETE ON entry
BEGIN
    SELECT raise(ABORT, 'the ledger is append-only: an entry never goes');
END;

-- The digest of a call's input under the store's key. It stands beside the ledger, because it can be erased.
CREATE TABLE input_digest (
    idx INTEGER PRIMARY KEY REFERENCES entry (idx),
    hash TEXT NOT NULL
) STRICT;

-- What people read first of each entry.
CREATE VIEW ledger AS
SELECT
    entry.run_id AS session_id,
    coalesce(json_extract(leaf, '$.turn'), 0) AS turn_count,
    entry.type || coalesce(':' || json_extract(leaf, '$.tool'), '') AS state_origin,
    input_digest.hash AS input_hash,
    coalesce(json_extract(leaf, '$.tokens'), 0) AS token_delta,
    coalesce(json_extract(leaf, '$.ms'), 0) AS execution_time_ms,
    CASE
        WHEN entry.type IN ('call_refused', 'turn_refused', 'lost', 'stop') THEN 'fail'
        WHEN entry.type IN ('result', 'turn') AND json_extract(leaf, '$.ok') IS NULL THEN 'fail'
        ELSE 'pass'
    END AS pass_fail,
    CASE WHEN entry.type <> 'complete' THEN entry.reason END AS breach_reason,
    strftime('%Y-%m-%dT%H:%M:%S', ts_us / 1000000, 'unixepoch') || printf('.%06dZ', ts_us % 1000000) AS created_at
FROM entry LEFT JOIN input_digest ON input_digest.idx = entry.idx
ORDER BY entry.idx;

-- What is known of the store itself.
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value ANY NOT NULL
) STRICT, WITHOUT ROWID;

-- A root run: what seldom changes.
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE,
    agent TEXT NOT NULL,
    labels TEXT NOT NULL,
    spec TEXT NOT NULL,
    policy_digest TEXT NOT NULL,
    run_key BLOB,
    created_at_us INTEGER NOT NULL,
    state TEXT NOT NULL,
    generation INTEGER NOT NULL,
    limits TEXT NOT NULL,
    owners TEXT NOT NULL,
    first_seq INTEGER NOT NULL,
    checkpoint TEXT,
    checkpoint_seq INTEGER,
    checkpoint_at_us INTEGER,
    envelope TEXT,
    output TEXT
) STRICT;

CREATE INDEX run_newest ON run (created_at_us, run_id);

-- A root run: what changes with every step. Apart, so that a step rewrites little.
CREATE TABLE run_state (
    id INTEGER PRIMARY KEY REFERENCES run (id),
    next_seq INTEGER NOT NULL,
    updated_at_us INTEGER NOT NULL,
    evidence BLOB NOT NULL
) STRICT;

-- A child run: a label inside its root's run.
CREATE TABLE child (
    run_id TEXT PRIMARY KEY,
    root_run_id TEXT NOT NULL REFERENCES run (run_id),
    parent_run_id TEXT NOT NULL,
    depth INTEGER NOT NULL,
    agent TEXT NOT NULL,
    created_at_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- A spec that was written down before its run started.
CREATE TABLE spec (
    run_id TEXT PRIMARY KEY,
    spec TEXT NOT NULL,
    created_at_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- One side effect under its key. Keys come in no order: in rows of their own order, a settlement rewrites one page.
CREATE TABLE operation (
    id INTEGER PRIMARY KEY,
    operation_id TEXT NOT NULL UNIQUE,
    tool TEXT NOT NULL,
    key_digest TEXT,
    fingerprint TEXT NOT NULL,
    state TEXT NOT NULL,
    run_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    call_id TEXT NOT NULL,
    owner_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    effect TEXT NOT NULL,
    created_at_us INTEGER NOT NULL,
    dispatched_at_us INTEGER,
    settled_at_us INTEGER,
    not_before_us INTEGER NOT NULL,
    outcome TEXT,
    result_kind TEXT,
    result BLOB,
    result_digest TEXT,
    reason TEXT NOT NULL
) STRICT;

CREATE INDEX operation_of_run ON operation (run_id);

-- An operator's standing order.
CREATE TABLE control (
    id INTEGER PRIMARY KEY,
    control_id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    run_id TEXT,
    label TEXT,
    tool TEXT,
    effect TEXT,
    args TEXT NOT NULL,
    reason TEXT NOT NULL,
    actor TEXT NOT NULL,
    created_at_us INTEGER NOT NULL,
    withdrawn_at_us INTEGER
) STRICT;

CREATE INDEX control_in_force ON control (id) WHERE withdrawn_at_us IS NULL;
