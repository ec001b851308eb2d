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
-- does not pass them by, and of the whole statement, so that TRUNCATE does not either. Functions keep their plans:
-- those that look into a table that grows must not settle on reading all of it while it is small, hence their settings.
CREATE FUNCTION endstop.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is append-only: % on % is refused', tg_op, tg_table_name USING ERRCODE = 'ES002';
END
$$;

CREATE FUNCTION endstop.check_entries() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off SET jit = off AS $$
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

CREATE FUNCTION endstop.check_places() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off SET jit = off AS $$
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
    stamp text COLLATE "C" NOT NULL,
    next_seq bigint NOT NULL,
    updated_at_us bigint NOT NULL,
    evidence text COLLATE "C" NOT NULL
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
    reason text NOT NULL,
    extra text
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

-- The two halves of a writer's transaction, and both in one. As functions they are planned once a session instead of
-- once a batch, and a batch is one or two exchanges with the server however many rows it has. A later schema adds
-- functions beside them.

-- Bound this transaction, take its locks in the order that everybody keeps, and read what it asks for.
CREATE FUNCTION endstop.begin_batch(
    space integer, alone boolean, lock_ms text, statement_ms text, idle_ms text, asked jsonb, OUT held jsonb,
    OUT controls_last bigint, OUT controls_many bigint, OUT operations jsonb
) LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    names text[] := ARRAY(SELECT jsonb_array_elements_text(asked -> 'names'));
    run_ids text[] := ARRAY(SELECT jsonb_array_elements_text(asked -> 'runs'));
    operation_ids text[] := ARRAY(SELECT jsonb_array_elements_text(asked -> 'operations'));
BEGIN
    -- 1. Durable, whatever the role's default is, and bounded; all of it ends with the transaction.
    PERFORM
        set_config(
            'synchronous_commit',
            CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true
        ),
        set_config('lock_timeout', lock_ms, true), set_config('statement_timeout', statement_ms, true),
        set_config('idle_in_transaction_session_timeout', idle_ms, true);
    -- 2. The gate: steps stand in it together, an order alone.
    IF alone THEN
        PERFORM pg_advisory_xact_lock(space, 1);
    ELSE
        PERFORM pg_advisory_xact_lock_shared(space, 1);
    END IF;
    -- 3. Names of runs that may be made.
    IF names <> '{}' THEN
        PERFORM pg_advisory_xact_lock(space + 1, name) FROM (
            SELECT DISTINCT hashtext(id) AS name FROM unnest(names) AS id ORDER BY 1
        ) AS sorted;
    END IF;
    -- 4. Root runs, named by themselves or by a child.
    IF run_ids <> '{}' THEN
        SELECT jsonb_object_agg(run_id, stamp) INTO held FROM (
            SELECT run_id, stamp FROM endstop.run_state
            WHERE run_id = ANY (ARRAY(
                SELECT id FROM unnest(run_ids) AS id
                UNION SELECT root_run_id FROM endstop.child WHERE child.run_id = ANY (run_ids)
            ))
            ORDER BY run_id FOR UPDATE
        ) AS rows;
    END IF;
    -- 5. Only now what may have been committed while this transaction waited. No two different sets of orders in
    -- force give the same pair: ids only grow, and what was withdrawn never comes back.
    SELECT coalesce(max(id), 0), count(*) INTO controls_last, controls_many
    FROM endstop.control WHERE withdrawn_at_us IS NULL;
    IF operation_ids <> '{}' THEN
        SELECT jsonb_agg(jsonb_build_array(
            operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence,
            effect, created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind,
            encode(result, 'hex'), result_digest, reason, extra
        )) INTO operations FROM endstop.operation WHERE operation_id = ANY (operation_ids);
    END IF;
END
$$;

-- Write what a batch has made, each row over exactly the version that was read; ES001 when one is another by now.
CREATE FUNCTION endstop.save_batch(by_writer text, new_number bigint, new_stamp text, batch jsonb) RETURNS void LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    got bigint;
    ids bigint[];
BEGIN
    -- 1. Runs; those that were not locked before are locked by being written.
    IF batch ? 'new_runs' THEN
        INSERT INTO endstop.run (
            run_id, agent, labels, spec, policy_digest, run_key, created_at_us, state, generation, limits, owners,
            first_seq, checkpoint, checkpoint_seq, checkpoint_at_us, envelope, output
        )
        SELECT
            run_id, agent, labels, spec, policy_digest, decode(run_key, 'hex'), created_at_us, state, generation,
            limits, owners, first_seq, checkpoint, checkpoint_seq, checkpoint_at_us, envelope, output
        FROM jsonb_to_recordset(batch -> 'new_runs') AS r (
            run_id text, agent text, labels text, spec text, policy_digest text, run_key text, created_at_us bigint,
            state text, generation bigint, limits text, owners text, first_seq bigint, checkpoint text,
            checkpoint_seq bigint, checkpoint_at_us bigint, envelope text, output text
        ) ORDER BY run_id;
        INSERT INTO endstop.run_state (run_id, stamp, next_seq, updated_at_us, evidence)
        SELECT run_id, new_stamp, next_seq, updated_at_us, evidence
        FROM jsonb_to_recordset(batch -> 'new_runs') AS r (
            run_id text, next_seq bigint, updated_at_us bigint, evidence text
        ) ORDER BY run_id;
    END IF;
    IF batch ? 'states' THEN
        UPDATE endstop.run_state SET
            stamp = new_stamp, next_seq = r.next_seq, updated_at_us = r.updated_at_us, evidence = r.evidence
        FROM jsonb_to_recordset(batch -> 'states') AS r (
            run_id text, next_seq bigint, updated_at_us bigint, evidence text, read_stamp text
        )
        WHERE run_state.run_id = r.run_id COLLATE "C"
            AND (r.read_stamp IS NULL OR run_state.stamp = r.read_stamp COLLATE "C");
        GET DIAGNOSTICS got = ROW_COUNT;
        IF got <> jsonb_array_length(batch -> 'states') THEN
            RAISE EXCEPTION 'somebody worked on a run' USING ERRCODE = 'ES001';
        END IF;
    END IF;
    IF batch ? 'runs' THEN
        UPDATE endstop.run SET
            state = r.state, generation = r.generation, limits = r.limits, owners = r.owners, first_seq = r.first_seq,
            checkpoint = r.checkpoint, checkpoint_seq = r.checkpoint_seq, checkpoint_at_us = r.checkpoint_at_us,
            envelope = r.envelope, output = r.output
        FROM jsonb_to_recordset(batch -> 'runs') AS r (
            run_id text, state text, generation bigint, limits text, owners text, first_seq bigint, checkpoint text,
            checkpoint_seq bigint, checkpoint_at_us bigint, envelope text, output text
        ) WHERE run.run_id = r.run_id COLLATE "C";
        GET DIAGNOSTICS got = ROW_COUNT;
        IF got <> jsonb_array_length(batch -> 'runs') THEN
            RAISE EXCEPTION 'a run is gone' USING ERRCODE = 'ES001';
        END IF;
    END IF;
    IF batch ? 'children' THEN
        INSERT INTO endstop.child (run_id, root_run_id, parent_run_id, depth, agent, created_at_us)
        SELECT run_id, root_run_id, parent_run_id, depth, agent, created_at_us
        FROM jsonb_to_recordset(batch -> 'children') AS r (
            run_id text, root_run_id text, parent_run_id text, depth bigint, agent text, created_at_us bigint
        ) ORDER BY run_id;
    END IF;
    -- 2. Operations.
    IF batch ? 'new_operations' THEN
        INSERT INTO endstop.operation (
            operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence,
            effect, created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result,
            result_digest, reason, extra
        )
        SELECT
            operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence,
            effect, created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind,
            decode(result, 'hex'), result_digest, reason, extra
        FROM jsonb_to_recordset(batch -> 'new_operations') AS r (
            operation_id text, tool text, key_digest text, fingerprint text, state text, run_id text,
            generation bigint, call_id text, owner_id text, attempt bigint, fence bigint, effect text,
            created_at_us bigint, dispatched_at_us bigint, settled_at_us bigint, not_before_us bigint, outcome text,
            result_kind text, result text, result_digest text, reason text, extra text
        ) ORDER BY operation_id COLLATE "C"
        ON CONFLICT (operation_id) DO NOTHING;
        GET DIAGNOSTICS got = ROW_COUNT;
        IF got <> jsonb_array_length(batch -> 'new_operations') THEN
            RAISE EXCEPTION 'somebody took a key' USING ERRCODE = 'ES001';
        END IF;
    END IF;
    IF batch ? 'operations' THEN
        UPDATE endstop.operation SET
            tool = r.tool, key_digest = r.key_digest, fingerprint = r.fingerprint, state = r.state, run_id = r.run_id,
            generation = r.generation, call_id = r.call_id, owner_id = r.owner_id, attempt = r.attempt,
            fence = r.fence, effect = r.effect, created_at_us = r.created_at_us, dispatched_at_us = r.dispatched_at_us,
            settled_at_us = r.settled_at_us, not_before_us = r.not_before_us, outcome = r.outcome,
            result_kind = r.result_kind, result = decode(r.result, 'hex'), result_digest = r.result_digest,
            reason = r.reason, extra = r.extra
        FROM jsonb_to_recordset(batch -> 'operations') AS r (
            operation_id text, tool text, key_digest text, fingerprint text, state text, run_id text,
            generation bigint, call_id text, owner_id text, attempt bigint, fence bigint, effect text,
            created_at_us bigint, dispatched_at_us bigint, settled_at_us bigint, not_before_us bigint, outcome text,
            result_kind text, result text, result_digest text, reason text, extra text, read_attempt bigint,
            read_fence bigint, read_state text
        )
        WHERE operation.operation_id = r.operation_id COLLATE "C" AND operation.attempt = r.read_attempt
            AND operation.fence = r.read_fence AND operation.state = r.read_state COLLATE "C";
        GET DIAGNOSTICS got = ROW_COUNT;
        IF got <> jsonb_array_length(batch -> 'operations') THEN
            RAISE EXCEPTION 'somebody changed an operation' USING ERRCODE = 'ES001';
        END IF;
    END IF;
    -- 3. The ledger. Leaves keep their order, and wait for the sequencer.
    IF batch ? 'leaves' THEN
        WITH added AS (
            INSERT INTO endstop.entry (leaf)
            SELECT leaf FROM ROWS FROM (
                jsonb_to_recordset(batch -> 'leaves') AS (leaf text)
            ) WITH ORDINALITY AS u (leaf, n) ORDER BY n
            RETURNING id
        )
        SELECT array_agg(id ORDER BY id) INTO ids FROM added;
        INSERT INTO endstop.input_digest (entry_id, hash)
        SELECT ids[n], hash FROM ROWS FROM (
            jsonb_to_recordset(batch -> 'leaves') AS (hash text)
        ) WITH ORDINALITY AS u (hash, n) WHERE hash IS NOT NULL;
        INSERT INTO endstop.outbox (entry_ids) VALUES (ids);
    END IF;
    -- 4. What an operator wrote.
    IF batch ? 'specs' THEN
        INSERT INTO endstop.spec (run_id, spec, created_at_us)
        SELECT run_id, spec, created_at_us
        FROM jsonb_to_recordset(batch -> 'specs') AS r (run_id text, spec text, created_at_us bigint)
        ORDER BY run_id;
    END IF;
    IF batch ? 'new_controls' THEN
        INSERT INTO endstop.control (
            control_id, kind, run_id, label, tool, effect, args, reason, actor, created_at_us, withdrawn_at_us
        )
        SELECT control_id, kind, run_id, label, tool, effect, args, reason, actor, created_at_us, withdrawn_at_us
        FROM ROWS FROM (jsonb_to_recordset(batch -> 'new_controls') AS (
            control_id text, kind text, run_id text, label text, tool text, effect text, args text, reason text,
            actor text, created_at_us bigint, withdrawn_at_us bigint
        )) WITH ORDINALITY AS u (
            control_id, kind, run_id, label, tool, effect, args, reason, actor, created_at_us, withdrawn_at_us, n
        ) ORDER BY n;
    END IF;
    IF batch ? 'withdrawn' THEN
        UPDATE endstop.control SET withdrawn_at_us = r.at_us
        FROM jsonb_to_recordset(batch -> 'withdrawn') AS r (control_id text, at_us bigint)
        WHERE control.control_id = r.control_id COLLATE "C" AND control.withdrawn_at_us IS NULL;
    END IF;
    -- 5. Workers that enter a run are taken to be alive for one lease from now.
    IF batch ? 'workers' THEN
        INSERT INTO endstop.worker (owner_id, lease_until)
        SELECT id, clock_timestamp() + (batch ->> 'lease_ms')::bigint * interval '1 millisecond'
        FROM jsonb_array_elements_text(batch -> 'workers') AS id ORDER BY id COLLATE "C"
        ON CONFLICT (owner_id) DO UPDATE SET lease_until = excluded.lease_until;
    END IF;
    -- 6. The writer's own count.
    UPDATE endstop.writer SET batch_no = new_number, seen_at = clock_timestamp()
    WHERE writer_id = by_writer AND batch_no = new_number - 1;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'writer % is unknown', by_writer USING ERRCODE = 'ES003';
    END IF;
END
$$;

-- A whole transaction in one exchange, for a writer that has the newest version of everything in hand, or thinks so:
-- lock as in `begin_batch`, refuse with ES001 when something is another by now, else write. Run as a statement of its
-- own, so nothing is held while the client is away.
CREATE FUNCTION endstop.commit_batch(
    space integer, lock_ms text, statement_ms text, idle_ms text, asked jsonb, by_writer text, new_number bigint,
    new_stamp text, batch jsonb
) RETURNS void LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    found_held jsonb;
    found_last bigint;
    found_many bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'each statement must see what was committed before it' USING ERRCODE = 'ES004';
    END IF;
    SELECT held, controls_last, controls_many INTO found_held, found_last, found_many
    FROM endstop.begin_batch(space, false, lock_ms, statement_ms, idle_ms, asked);
    IF coalesce(found_held, '{}') <> asked -> 'stamps' OR found_last <> (asked ->> 'controls_last')::bigint
        OR found_many <> (asked ->> 'controls_many')::bigint
    THEN
        RAISE EXCEPTION 'a run or an order is another by now' USING ERRCODE = 'ES001';
    END IF;
    PERFORM endstop.save_batch(by_writer, new_number, new_stamp, batch);
END
$$;
