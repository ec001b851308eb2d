-- Every statement of the PostgreSQL store but its schema, each under a name with one line of purpose.

-- name: begin
-- Start a transaction that sees, in each statement, what was committed before it, whatever the role's default is.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;

-- name: begin_read
-- Start a transaction whose statements all see one state.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;

-- name: bound
-- Make this transaction durable, and bound how long it may wait, work and idle; all of it ends with the transaction.
SELECT
    set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true),
    set_config('lock_timeout', %(lock_ms)s, true), set_config('statement_timeout', %(statement_ms)s, true),
    set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true), set_config('search_path', 'pg_catalog', true);

-- name: gate
-- Let this transaction in beside others: orders are shut out until it has ended.
SELECT pg_advisory_xact_lock_shared(%(space)s, 1);

-- name: gate_alone
-- Let this transaction in for an order: no step is under way anywhere from here to its end.
SELECT pg_advisory_xact_lock(%(space)s, 1);

-- name: gate_sequencer
-- Be the sequencer until this transaction has ended.
SELECT pg_advisory_xact_lock(%(space)s, 2);

-- name: try_gate_sequencer
-- Be the sequencer unless another one is at work.
SELECT pg_try_advisory_xact_lock(%(space)s, 2);

-- name: hold_names
-- Own the names of runs that may be made now, in one order for everybody.
SELECT pg_advisory_xact_lock(%(space)s + 1, name) FROM (
    SELECT DISTINCT hashtext(id) AS name FROM unnest(%(ids)s::text[]) AS id ORDER BY 1
) AS names;

-- name: hold_runs
-- Own some root runs, named by themselves or by a child, in one order for everybody; says which version each has.
SELECT run_id, stamp FROM endstop.run_state
WHERE run_id = ANY (ARRAY(
    SELECT id FROM unnest(%(ids)s::text[]) AS id
    UNION SELECT root_run_id FROM endstop.child WHERE child.run_id = ANY (%(ids)s::text[])
))
ORDER BY run_id FOR UPDATE;

-- name: controls_version
-- Which orders are in force, in short: no two different sets give the same pair.
SELECT coalesce(max(id), 0), count(*) FROM endstop.control WHERE withdrawn_at_us IS NULL;

-- name: add_entries
-- Append leaves in their order, with the digests of their inputs, and leave them for the sequencer.
WITH fresh AS MATERIALIZED (
    SELECT leaf, hash, n FROM unnest(%(leaves)s::text[], %(hashes)s::text[]) WITH ORDINALITY AS u (leaf, hash, n)
), added AS (
    INSERT INTO endstop.entry (leaf) SELECT leaf FROM fresh ORDER BY n RETURNING id, leaf
), kept AS (
    INSERT INTO endstop.input_digest (entry_id, hash)
    SELECT added.id, fresh.hash FROM added JOIN fresh ON fresh.leaf = added.leaf COLLATE "C" WHERE fresh.hash IS NOT NULL
)
INSERT INTO endstop.outbox (entry_ids)
SELECT array_agg(added.id ORDER BY fresh.n) FROM added JOIN fresh ON fresh.leaf = added.leaf COLLATE "C";

-- name: next_seq
-- The number that the next entry of a run takes.
SELECT coalesce(max(run_seq), -1) + 1 FROM endstop.entry WHERE run_id = %(run_id)s;

-- name: insert_run
-- Make a root run.
WITH made AS (
    INSERT INTO endstop.run (
        run_id, agent, labels, spec, policy_digest, run_key, created_at_us, state, generation, limits, owners, first_seq,
        checkpoint, checkpoint_seq, checkpoint_at_us, envelope, output
    ) VALUES (
        %(run_id)s, %(agent)s, %(labels)s, %(spec)s, %(policy_digest)s, %(run_key)s, %(created_at_us)s, %(state)s,
        %(generation)s, %(limits)s, %(owners)s, %(first_seq)s, %(checkpoint)s, %(checkpoint_seq)s, %(checkpoint_at_us)s,
        %(envelope)s, %(output)s
    )
)
INSERT INTO endstop.run_state (run_id, stamp, next_seq, updated_at_us, evidence)
VALUES (%(run_id)s, %(stamp)s, %(next_seq)s, %(updated_at_us)s, %(evidence)s);

-- name: update_run
-- Save what seldom changes of a root run.
UPDATE endstop.run SET
    state = %(state)s, generation = %(generation)s, limits = %(limits)s, owners = %(owners)s, first_seq = %(first_seq)s,
    checkpoint = %(checkpoint)s, checkpoint_seq = %(checkpoint_seq)s, checkpoint_at_us = %(checkpoint_at_us)s,
    envelope = %(envelope)s, output = %(output)s
WHERE run_id = %(run_id)s;

-- name: update_run_states
-- Save what changes with every step, of many runs.
WITH saved AS (
    UPDATE endstop.run_state SET
        stamp = %(stamp)s, next_seq = u.next_seq, updated_at_us = u.updated_at_us, evidence = u.evidence
    FROM unnest(%(run_ids)s::text[], %(next_seqs)s::bigint[], %(updates_at_us)s::bigint[], %(evidences)s::bytea[])
        AS u (run_id, next_seq, updated_at_us, evidence)
    WHERE run_state.run_id = u.run_id COLLATE "C"
    RETURNING 1
)
SELECT endstop.expect('runs', %(many)s, (SELECT count(*) FROM saved));

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

-- name: run_key
-- The key of one run's digests.
SELECT run_key FROM endstop.run WHERE run_id = %(run_id)s;

-- name: evidence
-- One run's packed evidence.
SELECT evidence FROM endstop.run_state WHERE run_id = %(run_id)s;

-- name: insert_child
-- Make a child run.
INSERT INTO endstop.child (run_id, root_run_id, parent_run_id, depth, agent, created_at_us)
VALUES (%(run_id)s, %(root_run_id)s, %(parent_run_id)s, %(depth)s, %(agent)s, %(created_at_us)s);

-- name: child
-- One child run.
SELECT run_id, root_run_id, parent_run_id, depth, agent, created_at_us FROM endstop.child WHERE run_id = %(run_id)s;

-- name: children_newest_first
-- Child runs in the order of a list, a page at a time.
SELECT run_id, root_run_id, parent_run_id, depth, agent, created_at_us FROM endstop.child
WHERE (created_at_us, run_id) < (%(before_us)s, %(before_id)s)
ORDER BY created_at_us DESC, run_id DESC
LIMIT %(many)s;

-- name: insert_spec
-- Keep a spec for a run that has not started.
INSERT INTO endstop.spec (run_id, spec, created_at_us) VALUES (%(run_id)s, %(spec)s, %(created_at_us)s);

-- name: spec
-- The spec that was written down for a run.
SELECT run_id, spec, created_at_us FROM endstop.spec WHERE run_id = %(run_id)s;

-- name: operations_by_id
-- Some operations.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason
FROM endstop.operation WHERE operation_id = ANY (%(ids)s::text[]);

-- name: operations
-- Operations in some states or in all, oldest first.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason
FROM endstop.operation
WHERE %(states)s::text[] IS NULL OR state = ANY (%(states)s::text[])
ORDER BY created_at_us, operation_id
LIMIT %(many)s;

-- name: operations_open
-- Operations in some states that are not final, oldest first.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason
FROM endstop.operation
WHERE state NOT IN ('COMMITTED', 'FAILED_FINAL', 'POISONED', 'CANCELLED', 'TOMBSTONE')
    AND state = ANY (%(states)s::text[])
ORDER BY created_at_us, operation_id
LIMIT %(many)s;

-- name: operations_of_run
-- Operations of one run, in some states or in all, oldest first.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason
FROM endstop.operation
WHERE run_id = %(run_id)s AND (%(states)s::text[] IS NULL OR state = ANY (%(states)s::text[]))
ORDER BY created_at_us, operation_id
LIMIT %(many)s;

-- name: insert_operations
-- Write operations that nobody has written yet; a key that somebody took meanwhile fails the transaction.
WITH saved AS (
    INSERT INTO endstop.operation (
        operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
        created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason
    )
    SELECT * FROM unnest(
        %(operation_ids)s::text[], %(tools)s::text[], %(key_digests)s::text[], %(fingerprints)s::text[],
        %(states)s::text[], %(run_ids)s::text[], %(generations)s::bigint[], %(call_ids)s::text[], %(owner_ids)s::text[],
        %(attempts)s::bigint[], %(fences)s::bigint[], %(effects)s::text[], %(created_at_us)s::bigint[],
        %(dispatched_at_us)s::bigint[], %(settled_at_us)s::bigint[], %(not_before_us)s::bigint[], %(outcomes)s::text[],
        %(result_kinds)s::text[], %(results)s::bytea[], %(result_digests)s::text[], %(reasons)s::text[]
    ) AS u (operation_id)
    ORDER BY u.operation_id COLLATE "C"
    ON CONFLICT (operation_id) DO NOTHING
    RETURNING 1
)
SELECT endstop.expect('new operations', %(many)s, (SELECT count(*) FROM saved));

-- name: update_operations
-- Write operations over exactly the version that was read: its attempt, its fence and its state.
WITH saved AS (
    UPDATE endstop.operation SET
        tool = u.tool, key_digest = u.key_digest, fingerprint = u.fingerprint, state = u.state, run_id = u.run_id,
        generation = u.generation, call_id = u.call_id, owner_id = u.owner_id, attempt = u.attempt, fence = u.fence,
        effect = u.effect, created_at_us = u.created_at_us, dispatched_at_us = u.dispatched_at_us,
        settled_at_us = u.settled_at_us, not_before_us = u.not_before_us, outcome = u.outcome,
        result_kind = u.result_kind, result = u.result, result_digest = u.result_digest, reason = u.reason
    FROM unnest(
        %(operation_ids)s::text[], %(tools)s::text[], %(key_digests)s::text[], %(fingerprints)s::text[],
        %(states)s::text[], %(run_ids)s::text[], %(generations)s::bigint[], %(call_ids)s::text[], %(owner_ids)s::text[],
        %(attempts)s::bigint[], %(fences)s::bigint[], %(effects)s::text[], %(created_at_us)s::bigint[],
        %(dispatched_at_us)s::bigint[], %(settled_at_us)s::bigint[], %(not_before_us)s::bigint[], %(outcomes)s::text[],
        %(result_kinds)s::text[], %(results)s::bytea[], %(result_digests)s::text[], %(reasons)s::text[],
        %(read_attempts)s::bigint[], %(read_fences)s::bigint[], %(read_states)s::text[]
    ) AS u (
        operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
        created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest,
        reason, read_attempt, read_fence, read_state
    )
    WHERE operation.operation_id = u.operation_id COLLATE "C" AND operation.attempt = u.read_attempt
        AND operation.fence = u.read_fence AND operation.state = u.read_state COLLATE "C"
    RETURNING 1
)
SELECT endstop.expect('operations', %(many)s, (SELECT count(*) FROM saved));

-- name: insert_control
-- Put an order in force.
INSERT INTO endstop.control (
    control_id, kind, run_id, label, tool, effect, args, reason, actor, created_at_us, withdrawn_at_us
) VALUES (
    %(control_id)s, %(kind)s, %(run_id)s, %(label)s, %(tool)s, %(effect)s, %(args)s, %(reason)s, %(actor)s,
    %(created_at_us)s, %(withdrawn_at_us)s
);

-- name: withdraw_control
-- Withdraw an order.
UPDATE endstop.control SET withdrawn_at_us = %(at_us)s WHERE control_id = %(control_id)s AND withdrawn_at_us IS NULL;

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

-- name: count_batch
-- Note that this writer has committed one more transaction.
WITH saved AS (
    UPDATE endstop.writer SET batch_no = %(batch_no)s, seen_at = clock_timestamp()
    WHERE writer_id = %(writer_id)s AND batch_no = %(batch_no)s - 1
    RETURNING 1
)
SELECT endstop.expect('writers', 1, (SELECT count(*) FROM saved));

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
-- Whether there is a store in this database.
SELECT to_regclass('endstop.store') IS NOT NULL;

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
