CREATE SCHEMA IF NOT EXISTS endstop;

-- What is known of the store itself: one row. `schema_floor` is the oldest schema version whose code still works here.
CREATE TABLE endstop.store (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    ledger text NOT NULL,
    store_key bytea NOT NULL CHECK (octet_length(store_key) = 32),
    created_at_us bigint NOT NULL,
    schema_version integer NOT NULL,
    schema_floor integer NOT NULL
);

-- The ledger's leaves: the exact stored bytes; every other column is generated from them.
CREATE TABLE endstop.entry (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    leaf text COLLATE "C" NOT NULL CHECK (octet_length(leaf) <= 65535),
    run_id text COLLATE "C" NOT NULL GENERATED ALWAYS AS (leaf::jsonb ->> 'run') STORED,
    run_seq bigint NOT NULL GENERATED ALWAYS AS ((leaf::jsonb ->> 'seq')::bigint) STORED,
    UNIQUE (run_id, run_seq)
);

-- The ledger's order: positions 0, 1, 2, ... without a gap. The sequencer alone writes it.
CREATE TABLE endstop.place (
    idx bigint PRIMARY KEY,
    entry_id bigint NOT NULL UNIQUE
);

-- Entries that have no position yet, a row for each transaction that made some. Written with them, taken by the
-- sequencer.
CREATE TABLE endstop.outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    entry_ids bigint[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

-- The digest of a call's input under the store's key. It stands beside the ledger, because it can be erased.
CREATE TABLE endstop.input_digest (
    entry_id bigint PRIMARY KEY,
    hash text NOT NULL
);

-- Appending is all that the ledger allows. The triggers are ENABLE ALWAYS, so that a session which plays a replica
-- does not pass them by, and of the whole statement, so that TRUNCATE does not either.
CREATE FUNCTION endstop.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is append-only: % on % is refused', tg_op, tg_table_name USING ERRCODE = 'ES002';
END
$$;

CREATE FUNCTION endstop.check_entries() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM fresh
        WHERE run_seq <> 0 AND NOT EXISTS (
            SELECT FROM endstop.entry WHERE entry.run_id = fresh.run_id AND entry.run_seq = fresh.run_seq - 1
        )
    ) THEN
        RAISE EXCEPTION 'the ledger is append-only: an entry''s number must follow the last one of its run'
            USING ERRCODE = 'ES002';
    END IF;
    RETURN NULL;
END
$$;

CREATE FUNCTION endstop.check_places() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    first_idx bigint;
    last_idx bigint;
    many bigint;
BEGIN
    SELECT min(idx), max(idx), count(*) INTO first_idx, last_idx, many FROM fresh;
    IF many > 0 AND (
        last_idx - first_idx + 1 <> many OR EXISTS (SELECT FROM endstop.place WHERE idx > last_idx)
        OR (first_idx <> 0 AND NOT EXISTS (SELECT FROM endstop.place WHERE idx = first_idx - 1))
    ) THEN
        RAISE EXCEPTION 'the ledger is append-only: a position must follow the last one' USING ERRCODE = 'ES002';
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER entry_follows AFTER INSERT ON endstop.entry
    REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION endstop.check_entries();
CREATE TRIGGER entry_never_changes BEFORE UPDATE OR DELETE OR TRUNCATE ON endstop.entry
    FOR EACH STATEMENT EXECUTE FUNCTION endstop.refuse_change();
CREATE TRIGGER place_follows AFTER INSERT ON endstop.place
    REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION endstop.check_places();
CREATE TRIGGER place_never_changes BEFORE UPDATE OR DELETE OR TRUNCATE ON endstop.place
    FOR EACH STATEMENT EXECUTE FUNCTION endstop.refuse_change();

ALTER TABLE endstop.entry ENABLE ALWAYS TRIGGER entry_follows;
ALTER TABLE endstop.entry ENABLE ALWAYS TRIGGER entry_never_changes;
ALTER TABLE endstop.place ENABLE ALWAYS TRIGGER place_follows;
ALTER TABLE endstop.place ENABLE ALWAYS TRIGGER place_never_changes;

-- A count that the writer relied on: when it is another, the transaction fails and is tried again.
CREATE FUNCTION endstop.expect(what text, wanted bigint, got bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF got IS DISTINCT FROM wanted THEN
        RAISE EXCEPTION '% of % % were written', got, wanted, what USING ERRCODE = 'ES001';
    END IF;
    RETURN true;
END
$$;

-- What people read first of each entry.
CREATE VIEW endstop.ledger AS
SELECT
    entry.run_id AS session_id,
    coalesce((leaf::jsonb ->> 'turn')::bigint, 0) AS turn_count,
    (leaf::jsonb ->> 'type') || coalesce(':' || (leaf::jsonb ->> 'tool'), '') AS state_origin,
    input_digest.hash AS input_hash,
    coalesce((leaf::jsonb ->> 'tokens')::bigint, 0) AS token_delta,
    coalesce((leaf::jsonb ->> 'ms')::bigint, 0) AS execution_time_ms,
    CASE
        WHEN leaf::jsonb ->> 'type' IN ('call_refused', 'turn_refused', 'lost', 'stop') THEN 'fail'
        WHEN leaf::jsonb ->> 'type' IN ('result', 'turn') AND leaf::jsonb ->> 'ok' IS NULL THEN 'fail'
        ELSE 'pass'
    END AS pass_fail,
    CASE WHEN leaf::jsonb ->> 'type' <> 'complete' THEN leaf::jsonb ->> 'reason' END AS breach_reason,
    to_char(
        timestamp 'epoch' + (leaf::jsonb ->> 'ts_us')::bigint * interval '1 microsecond', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'
    ) AS created_at
FROM endstop.place
JOIN endstop.entry ON entry.id = place.entry_id
LEFT JOIN endstop.input_digest ON input_digest.entry_id = entry.id
ORDER BY place.idx;

-- A root run: what seldom changes.
CREATE TABLE endstop.run (
    run_id text COLLATE "C" PRIMARY KEY,
    agent text NOT NULL,
    labels text NOT NULL,
    spec text NOT NULL,
    policy_digest text NOT NULL,
    run_key bytea,
    created_at_us bigint NOT NULL,
    state text NOT NULL,
    generation bigint NOT NULL,
    limits text NOT NULL,
    owners text NOT NULL,
    first_seq bigint NOT NULL,
    checkpoint text,
    checkpoint_seq bigint,
    checkpoint_at_us bigint,
    envelope text,
    output text
);

CREATE INDEX run_newest ON endstop.run (created_at_us, run_id);

-- A root run: what changes with every step. Apart, so that a step rewrites little; whoever works on a run holds its
-- row here. `stamp` is new with every write, so that a copy in hand can be known to be the newest.
CREATE TABLE endstop.run_state (
    run_id text COLLATE "C" PRIMARY KEY,
    stamp bytea NOT NULL,
    next_seq bigint NOT NULL,
    updated_at_us bigint NOT NULL,
    evidence bytea NOT NULL
) WITH (fillfactor = 60, toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.1);

ALTER TABLE endstop.run_state ALTER COLUMN evidence SET STORAGE MAIN;

-- A child run: a label inside its root's run.
CREATE TABLE endstop.child (
    run_id text COLLATE "C" PRIMARY KEY,
    root_run_id text COLLATE "C" NOT NULL REFERENCES endstop.run (run_id),
    parent_run_id text COLLATE "C" NOT NULL,
    depth bigint NOT NULL,
    agent text NOT NULL,
    created_at_us bigint NOT NULL
);

CREATE INDEX child_newest ON endstop.child (created_at_us, run_id);

-- A spec that was written down before its run started.
CREATE TABLE endstop.spec (
    run_id text COLLATE "C" PRIMARY KEY,
    spec text NOT NULL,
    created_at_us bigint NOT NULL
);

-- One side effect under its key.
CREATE TABLE endstop.operation (
    operation_id text COLLATE "C" PRIMARY KEY,
    tool text NOT NULL,
    key_digest text,
    fingerprint text NOT NULL,
    state text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    call_id text NOT NULL,
    owner_id text NOT NULL,
    attempt bigint NOT NULL,
    fence bigint NOT NULL,
    effect text NOT NULL,
    created_at_us bigint NOT NULL,
    dispatched_at_us bigint,
    settled_at_us bigint,
    not_before_us bigint NOT NULL,
    outcome text,
    result_kind text,
    result bytea,
    result_digest text,
    reason text NOT NULL
) WITH (fillfactor = 80);

CREATE INDEX operation_of_run ON endstop.operation (run_id, created_at_us, operation_id);
CREATE INDEX operation_open ON endstop.operation (created_at_us, operation_id)
    WHERE state NOT IN ('COMMITTED', 'FAILED_FINAL', 'POISONED', 'CANCELLED', 'TOMBSTONE');

-- An operator's standing order.
CREATE TABLE endstop.control (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    control_id text COLLATE "C" NOT NULL UNIQUE,
    kind text NOT NULL,
    run_id text COLLATE "C",
    label text,
    tool text,
    effect text,
    args text NOT NULL,
    reason text NOT NULL,
    actor text NOT NULL,
    created_at_us bigint NOT NULL,
    withdrawn_at_us bigint
);

CREATE INDEX control_in_force ON endstop.control (id) WHERE withdrawn_at_us IS NULL;

-- How many transactions each writer has committed: it reads its own number back when the answer to COMMIT was lost,
-- and the sum tells everybody that something changed. The row '' holds the numbers of writers that are gone.
CREATE TABLE endstop.writer (
    writer_id text COLLATE "C" PRIMARY KEY,
    batch_no bigint NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 40);

INSERT INTO endstop.writer (writer_id, batch_no) VALUES ('', 0);

-- Worker instances and until when each is taken to be alive, on the database's own clock.
CREATE TABLE endstop.worker (
    owner_id text COLLATE "C" PRIMARY KEY,
    lease_until timestamptz NOT NULL
) WITH (fillfactor = 60);
