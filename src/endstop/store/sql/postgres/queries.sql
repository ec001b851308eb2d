-- Every statement of the PostgreSQL store but its schema, each under a name with one line of purpose.

-- name: begin
-- Start a transaction that sees, in each statement, what was committed before it, whatever the role's default is.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;

-- name: begin_read
-- Start a transaction whose statements all see one state.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;

-- name: begin_batch
-- Start a writer's transaction: bound it, take its locks and read what it asks for.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SELECT held, controls_last, controls_many, operations FROM endstop.begin_batch(
    %(space)s, %(alone)s, %(lock_ms)s, %(statement_ms)s, %(idle_ms)s, %(asked)s::jsonb
);

-- name: save_batch
-- Write what a batch has made, and make it durable.
SELECT endstop.save_batch(%(writer_id)s, %(batch_no)s, %(stamp)s, %(batch)s::jsonb);
COMMIT;

-- name: commit_batch
-- Check, write and make durable what a batch has made, all at once.
SELECT endstop.commit_batch(
    %(space)s, %(lock_ms)s, %(statement_ms)s, %(idle_ms)s, %(asked)s::jsonb, %(writer_id)s, %(batch_no)s, %(stamp)s,
    %(batch)s::jsonb
);

-- name: bound
-- Make this transaction durable, and bound how long it may wait, work and idle; all of it ends with the transaction.
SELECT
    set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true),
    set_config('lock_timeout', %(lock_ms)s, true), set_config('statement_timeout', %(statement_ms)s, true),
    set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true), set_config('search_path', 'pg_catalog', true);

-- name: gate_sequencer
-- Be the sequencer until this transaction has ended.
SELECT pg_advisory_xact_lock(%(space)s, 2);

-- name: try_gate_sequencer
-- Be the sequencer unless another one is at work.
SELECT pg_try_advisory_xact_lock(%(space)s, 2);

-- name: hold_runs
-- Own some root runs, named by themselves or by a child, in one order for everybody; says which version each has.
SELECT run_id, stamp FROM endstop.run_state
WHERE run_id = ANY (ARRAY(
    SELECT id FROM unnest(%(ids)s::text[]) AS id
    UNION SELECT root_run_id FROM endstop.child WHERE child.run_id = ANY (%(ids)s::text[])
))
ORDER BY run_id FOR UPDATE;

-- name: first_entry
-- Open the ledger: its first leaf, at position 0.
WITH added AS (INSERT INTO endstop.entry (leaf) VALUES (%(leaf)s) RETURNING id)
INSERT INTO endstop.place (idx, entry_id) SELECT 0, id FROM added;

-- name: next_seq
-- The number that the next entry of a run takes.
SELECT coalesce(max(run_seq), -1) + 1 FROM endstop.entry WHERE run_id = %(run_id)s;

-- name: runs_by_id
-- Root runs as they stand.
SELECT
    run.run_id, agent, labels, spec, policy_digest, run_key, created_at_us, state, generation, limits, owners,
    first_seq, checkpoint, checkpoint_seq, checkpoint_at_us, envelope, output, next_seq, updated_at_us, evidence
FROM endstop.run JOIN endstop.run_state ON run_state.run_id = run.run_id
WHERE run.run_id = ANY (%(ids)s::text[]);

-- name: runs_newest_first
-- Root runs in the order of a list, a page at a time: those made before a moment, or at it with a smaller id.
SELECT
    run.run_id, agent, labels, spec, policy_digest, run_key, created_at_us, state, generation, limits, owners,
    first_seq, checkpoint, checkpoint_seq, checkpoint_at_us, envelope, output, next_seq, updated_at_us, evidence
FROM endstop.run JOIN endstop.run_state ON run_state.run_id = run.run_id
WHERE (created_at_us, run.run_id) < (%(before_us)s, %(before_id)s)
    AND (%(states)s::text[] IS NULL OR state = ANY (%(states)s::text[]))
ORDER BY created_at_us DESC, run.run_id DESC
LIMIT %(many)s;

-- name: endings
-- Which of some root runs are over, and how.
SELECT run_id, envelope FROM endstop.run
WHERE run_id = ANY (%(ids)s::text[]) AND state IN ('stopped', 'complete', 'paused') AND envelope IS NOT NULL;

-- name: run_key
-- The key of one run's digests.
SELECT run_key FROM endstop.run WHERE run_id = %(run_id)s;

-- name: evidence
-- One run's packed evidence.
SELECT evidence FROM endstop.run_state WHERE run_id = %(run_id)s;

-- name: child
-- One child run.
SELECT run_id, root_run_id, parent_run_id, depth, agent, created_at_us FROM endstop.child WHERE run_id = %(run_id)s;

-- name: children_newest_first
-- Child runs in the order of a list, a page at a time.
SELECT run_id, root_run_id, parent_run_id, depth, agent, created_at_us FROM endstop.child
WHERE (created_at_us, run_id) < (%(before_us)s, %(before_id)s)
ORDER BY created_at_us DESC, run_id DESC
LIMIT %(many)s;

-- name: spec
-- The spec that was written down for a run.
SELECT run_id, spec, created_at_us FROM endstop.spec WHERE run_id = %(run_id)s;

-- name: operations_by_id
-- Some operations.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason,
    extra
FROM endstop.operation WHERE operation_id = ANY (%(ids)s::text[]);

-- name: operations
-- Operations in some states or in all, oldest first.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason,
    extra
FROM endstop.operation
WHERE %(states)s::text[] IS NULL OR state = ANY (%(states)s::text[])
ORDER BY created_at_us, operation_id
LIMIT %(many)s;

-- name: operations_open
-- Operations in some states that are not final, oldest first.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason,
    extra
FROM endstop.operation
WHERE state NOT IN ('COMMITTED', 'FAILED_FINAL', 'POISONED', 'CANCELLED', 'TOMBSTONE')
    AND state = ANY (%(states)s::text[])
ORDER BY created_at_us, operation_id
LIMIT %(many)s;

-- name: operations_of_run
-- Operations of one run, in some states or in all, oldest first.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason,
    extra
FROM endstop.operation
WHERE run_id = %(run_id)s AND (%(states)s::text[] IS NULL OR state = ANY (%(states)s::text[]))
ORDER BY created_at_us, operation_id
LIMIT %(many)s;

-- name: controls_in_force
-- Every order that stands, oldest first.
SELECT control_id, kind, run_id, label, tool, effect, args, reason, actor, created_at_us, withdrawn_at_us
FROM endstop.control WHERE withdrawn_at_us IS NULL ORDER BY id;

-- name: controls
-- Every order, oldest first.
SELECT control_id, kind, run_id, label, tool, effect, args, reason, actor, created_at_us, withdrawn_at_us
FROM endstop.control ORDER BY id;

-- name: control
-- One order's id, when it is taken.
SELECT control_id FROM endstop.control WHERE control_id = %(control_id)s;

-- name: enter_writer
-- Make a writer known before its first transaction.
INSERT INTO endstop.writer (writer_id, batch_no) VALUES (%(writer_id)s, 0);

-- name: committed_batch
-- What a writer has committed; waits until a transaction of it that is still open has ended.
SELECT batch_no FROM endstop.writer WHERE writer_id = %(writer_id)s FOR UPDATE;

-- name: retire_writers
-- Forget some writers, and those not seen for long; the sum of all numbers stays.
WITH gone AS (
    DELETE FROM endstop.writer
    WHERE writer_id <> ''
        AND (writer_id = ANY (%(writer_ids)s::text[]) OR seen_at < clock_timestamp() - %(kept_days)s * interval '1 day')
    RETURNING batch_no
)
UPDATE endstop.writer SET batch_no = batch_no + (SELECT coalesce(sum(gone.batch_no), 0) FROM gone)
WHERE writer_id = '' AND EXISTS (SELECT FROM gone);

-- name: change_counter
-- How many transactions changed something, of all writers.
SELECT sum(batch_no)::bigint FROM endstop.writer;

-- name: has_outbox
-- Whether entries wait for their position.
SELECT EXISTS (SELECT FROM endstop.outbox);

-- name: sequence
-- Give the entries that wait the positions that follow the last one; gives how many there were.
WITH due AS (
    DELETE FROM endstop.outbox WHERE id IN (SELECT id FROM endstop.outbox ORDER BY id LIMIT %(many)s)
    RETURNING id, entry_ids
), lined AS (
    SELECT u.entry_id, row_number() OVER (ORDER BY due.id, u.n) - 1 AS n
    FROM due, unnest(due.entry_ids) WITH ORDINALITY AS u (entry_id, n)
), placed AS (
    INSERT INTO endstop.place (idx, entry_id)
    SELECT (SELECT coalesce(max(idx), -1) + 1 FROM endstop.place) + n, entry_id FROM lined ORDER BY n
)
SELECT count(*) FROM due;

-- name: entries
-- Entries after a position.
SELECT idx, leaf FROM endstop.place JOIN endstop.entry ON entry.id = place.entry_id
WHERE idx > %(after)s ORDER BY idx LIMIT %(many)s;

-- name: entries_newest_first
-- Entries after a position, the last one first.
SELECT idx, leaf FROM endstop.place JOIN endstop.entry ON entry.id = place.entry_id
WHERE idx > %(after)s ORDER BY idx DESC LIMIT %(many)s;

-- name: entries_of_run
-- Entries of one run after a position; within a run, numbers and positions have one order.
SELECT idx, leaf FROM endstop.entry JOIN endstop.place ON place.entry_id = entry.id
WHERE run_id = %(run_id)s AND idx > %(after)s ORDER BY run_seq LIMIT %(many)s;

-- name: entries_of_run_newest_first
-- Entries of one run after a position, the last one first.
SELECT idx, leaf FROM endstop.entry JOIN endstop.place ON place.entry_id = entry.id
WHERE run_id = %(run_id)s AND idx > %(after)s ORDER BY run_seq DESC LIMIT %(many)s;

-- name: ledger_rows
-- What the ledger view is made of, oldest first.
SELECT leaf, hash FROM endstop.place JOIN endstop.entry ON entry.id = place.entry_id
LEFT JOIN endstop.input_digest ON input_digest.entry_id = entry.id
ORDER BY idx LIMIT %(many)s;

-- name: ledger_rows_of_run
-- What the ledger view is made of for one run, oldest first.
SELECT leaf, hash FROM endstop.entry JOIN endstop.place ON place.entry_id = entry.id
LEFT JOIN endstop.input_digest ON input_digest.entry_id = entry.id
WHERE run_id = %(run_id)s ORDER BY run_seq LIMIT %(many)s;

-- name: enter_workers
-- Take workers to be alive for one lease from now, by the database's clock.
INSERT INTO endstop.worker (owner_id, lease_until)
SELECT id, clock_timestamp() + %(lease_ms)s * interval '1 millisecond' FROM unnest(%(owner_ids)s::text[]) AS id
ORDER BY id COLLATE "C"
ON CONFLICT (owner_id) DO UPDATE SET lease_until = excluded.lease_until;

-- name: leave_workers
-- Workers that have ended, and those whose lease ran out long ago.
DELETE FROM endstop.worker
WHERE owner_id = ANY (%(owner_ids)s::text[]) OR lease_until < clock_timestamp() - %(kept_days)s * interval '1 day';

-- name: worker_alive
-- Whether a worker's lease runs.
SELECT lease_until > clock_timestamp() FROM endstop.worker WHERE owner_id = %(owner_id)s;

-- name: has_store
-- Whether there is a store in this database, asked of the tables: a name looked up before may be remembered as missing.
SELECT EXISTS (
    SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = 'endstop' AND relname = 'store'
);

-- name: store
-- What is known of the store itself.
SELECT ledger, store_key, schema_version, schema_floor FROM endstop.store;

-- name: insert_store
-- Name a new store.
INSERT INTO endstop.store (ledger, store_key, created_at_us, schema_version, schema_floor)
VALUES (%(ledger)s, %(store_key)s, %(created_at_us)s, %(version)s, 1);

-- name: set_version
-- Note that a migration was made, and from which version on code works here.
UPDATE endstop.store SET schema_version = %(version)s, schema_floor = greatest(schema_floor, %(floor)s);

-- name: hold_schema
-- One migration at a time.
SELECT pg_advisory_xact_lock(%(space)s, 3);

-- name: server
-- What the server says of itself.
SELECT current_setting('server_version'), current_setting('server_version_num')::integer, current_setting('fsync'),
    current_setting('full_page_writes'), current_setting('wal_level'), current_setting('synchronous_commit'),
    pg_is_in_recovery();

-- name: sizes
-- How many entries with a position and root runs there are.
SELECT (SELECT coalesce(max(idx), -1) + 1 FROM endstop.place), (SELECT count(*) FROM endstop.run);

-- name: triggers
-- The guards of the append-only tables, and whether each is on in every session.
SELECT count(*) FILTER (WHERE tgenabled = 'A'), count(*) FROM pg_trigger
WHERE NOT tgisinternal
    AND tgrelid IN (to_regclass('endstop.entry'), to_regclass('endstop.place'))
    AND tgname IN ('entry_follows', 'entry_never_changes', 'place_follows', 'place_never_changes');

-- name: rights
-- Who owns the ledger, who asks, and whether he could change it.
SELECT
    pg_get_userbyid(relowner), current_user::text, pg_has_role(current_user, relowner, 'MEMBER'),
    has_table_privilege(current_user, oid, 'UPDATE') OR has_table_privilege(current_user, oid, 'DELETE')
        OR has_table_privilege(current_user, oid, 'TRUNCATE')
FROM pg_class WHERE oid = to_regclass('endstop.entry');

-- name: misplaced
-- Whether the last positions have a gap, or an entry has lost its leaf.
SELECT count(*) FROM (SELECT idx, entry_id FROM endstop.place ORDER BY idx DESC LIMIT 1000) AS tail
LEFT JOIN endstop.entry ON entry.id = tail.entry_id
WHERE entry.id IS NULL OR (idx > 0 AND NOT EXISTS (SELECT FROM endstop.place WHERE place.idx = tail.idx - 1));
