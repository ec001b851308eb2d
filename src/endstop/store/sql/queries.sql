-- Every statement of the SQLite store but its schema, each under a name with one line of purpose.

-- name: insert_entry
-- Append one leaf to the ledger.
INSERT INTO entry (idx, leaf) VALUES (?, ?);

-- name: next_index
-- The position that the next entry takes.
SELECT coalesce(max(idx), -1) + 1 FROM entry;

-- name: next_seq
-- The number that the next entry of a run takes.
SELECT coalesce(max(run_seq), -1) + 1 FROM entry WHERE run_id = ?;

-- name: insert_input_digest
-- Keep the digest of the input behind an entry.
INSERT INTO input_digest (idx, hash) VALUES (?, ?);

-- name: insert_run
-- Make a root run.
INSERT INTO run (
    run_id, agent, labels, spec, policy_digest, run_key, created_at_us, state, generation, limits, owners, first_seq,
    checkpoint, checkpoint_seq, checkpoint_at_us, envelope, output
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
RETURNING id;

-- name: update_run
-- Save what seldom changes of a root run.
UPDATE run SET
    state = ?, generation = ?, limits = ?, owners = ?, first_seq = ?, checkpoint = ?, checkpoint_seq = ?,
    checkpoint_at_us = ?, envelope = ?, output = ?
WHERE id = ?;

-- name: update_run_state
-- Save what changes with every step.
INSERT INTO run_state (id, next_seq, updated_at_us, evidence) VALUES (?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    next_seq = excluded.next_seq, updated_at_us = excluded.updated_at_us, evidence = excluded.evidence;

-- name: run_by_id
-- One root run as it stands.
SELECT
    run.id, run_id, agent, labels, spec, policy_digest, run_key, created_at_us, state, generation, limits, owners,
    first_seq, checkpoint, checkpoint_seq, checkpoint_at_us, envelope, output, next_seq, updated_at_us, evidence
FROM run JOIN run_state ON run_state.id = run.id
WHERE run_id = ?;

-- name: runs_newest_first
-- Root runs in the order of a list, a page at a time: those made before a moment, or at it with a smaller id.
SELECT
    run.id, run_id, agent, labels, spec, policy_digest, run_key, created_at_us, state, generation, limits, owners,
    first_seq, checkpoint, checkpoint_seq, checkpoint_at_us, envelope, output, next_seq, updated_at_us, evidence
FROM run JOIN run_state ON run_state.id = run.id
WHERE (created_at_us, run_id) < (?1, ?2) AND (?3 IS NULL OR state IN (SELECT value FROM json_each(?3)))
ORDER BY created_at_us DESC, run_id DESC
LIMIT ?4;

-- name: endings
-- Which of some root runs are over, and how.
SELECT run_id, envelope FROM run
WHERE run_id IN (SELECT value FROM json_each(?)) AND state IN ('stopped', 'complete', 'paused') AND envelope IS NOT NULL;

-- name: run_key
-- The key of one run's digests.
SELECT run_key FROM run WHERE run_id = ?;

-- name: evidence
-- One run's packed evidence.
SELECT evidence FROM run_state JOIN run ON run.id = run_state.id WHERE run_id = ?;

-- name: insert_child
-- Make a child run.
INSERT INTO child (run_id, root_run_id, parent_run_id, depth, agent, created_at_us) VALUES (?, ?, ?, ?, ?, ?);

-- name: child
-- One child run.
SELECT run_id, root_run_id, parent_run_id, depth, agent, created_at_us FROM child WHERE run_id = ?;

-- name: children_newest_first
-- Child runs in the order of a list, a page at a time.
SELECT run_id, root_run_id, parent_run_id, depth, agent, created_at_us FROM child
WHERE (created_at_us, run_id) < (?1, ?2)
ORDER BY created_at_us DESC, run_id DESC
LIMIT ?3;

-- name: insert_spec
-- Keep a spec for a run that has not started.
INSERT INTO spec (run_id, spec, created_at_us) VALUES (?, ?, ?);

-- name: spec
-- The spec that was written down for a run.
SELECT run_id, spec, created_at_us FROM spec WHERE run_id = ?;

-- name: operation
-- One operation.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason,
    extra
FROM operation WHERE operation_id = ?;

-- name: operations
-- Operations of one run or of all, in some states or in all, oldest first.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason,
    extra
FROM operation
WHERE (?1 IS NULL OR state IN (SELECT value FROM json_each(?1)))
ORDER BY created_at_us, operation_id
LIMIT ?2;

-- name: operations_in_doubt
-- Operations of all runs that are in doubt, oldest first. The states are those of the index.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason,
    extra
FROM operation
WHERE state IN ('UNKNOWN', 'MANUAL') AND state IN (SELECT value FROM json_each(?1))
ORDER BY created_at_us, operation_id
LIMIT ?2;

-- name: operations_of_run
-- Operations of one run, in some states or in all, oldest first.
SELECT
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason,
    extra
FROM operation
WHERE run_id = ?3 AND (?1 IS NULL OR state IN (SELECT value FROM json_each(?1)))
ORDER BY created_at_us, operation_id
LIMIT ?2;

-- name: insert_operation
-- Write an operation that must not be there yet.
INSERT INTO operation (
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason,
    extra
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: update_operation
-- Write an operation that is there. A fence never goes back, whatever the work before it made of it.
INSERT INTO operation (
    operation_id, tool, key_digest, fingerprint, state, run_id, generation, call_id, owner_id, attempt, fence, effect,
    created_at_us, dispatched_at_us, settled_at_us, not_before_us, outcome, result_kind, result, result_digest, reason,
    extra
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (operation_id) DO UPDATE SET
    tool = excluded.tool, key_digest = excluded.key_digest, fingerprint = excluded.fingerprint, state = excluded.state,
    run_id = excluded.run_id, generation = excluded.generation, call_id = excluded.call_id,
    owner_id = excluded.owner_id, attempt = excluded.attempt, fence = excluded.fence, effect = excluded.effect,
    dispatched_at_us = excluded.dispatched_at_us, settled_at_us = excluded.settled_at_us,
    not_before_us = excluded.not_before_us, outcome = excluded.outcome, result_kind = excluded.result_kind,
    result = excluded.result, result_digest = excluded.result_digest, reason = excluded.reason, extra = excluded.extra
WHERE operation.fence <= excluded.fence;

-- name: settle_operation
-- Write the outcome of an operation whose owner and attempt are still the same.
UPDATE operation SET
    state = ?3, settled_at_us = ?4, not_before_us = ?5, outcome = ?6, result_kind = ?7, result = ?8,
    result_digest = ?9, reason = ?10
WHERE operation_id = ?1 AND fence = ?2;

-- name: settle_operations
-- The same for several at once, for one alone dearer.
UPDATE operation SET
    state = told.column3, settled_at_us = told.column4, not_before_us = told.column5, outcome = told.column6,
    result_kind = told.column7, result = told.column8, result_digest = told.column9, reason = told.column10
FROM (VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)) AS told
WHERE operation.operation_id = told.column1 AND operation.fence = told.column2;

-- name: insert_control
-- Put an order in force.
INSERT INTO control (control_id, kind, run_id, label, tool, effect, args, reason, actor, created_at_us, withdrawn_at_us)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: withdraw_control
-- Withdraw an order.
UPDATE control SET withdrawn_at_us = ? WHERE control_id = ? AND withdrawn_at_us IS NULL;

-- name: controls_in_force
-- Every order that stands, oldest first.
SELECT control_id, kind, run_id, label, tool, effect, args, reason, actor, created_at_us, withdrawn_at_us
FROM control WHERE withdrawn_at_us IS NULL ORDER BY id;

-- name: controls
-- Every order, oldest first.
SELECT control_id, kind, run_id, label, tool, effect, args, reason, actor, created_at_us, withdrawn_at_us
FROM control ORDER BY id;

-- name: control
-- One order's id, when it is taken.
SELECT control_id FROM control WHERE control_id = ?;

-- name: entries
-- Entries after a position.
SELECT idx, leaf FROM entry WHERE idx > ? ORDER BY idx LIMIT ?;

-- name: entries_newest_first
-- Entries after a position, the last one first.
SELECT idx, leaf FROM entry WHERE idx > ? ORDER BY idx DESC LIMIT ?;

-- name: entries_of_run
-- Entries of one run after a position; within a run, numbers and positions have one order.
SELECT idx, leaf FROM entry WHERE idx > ? AND run_id = ?3 ORDER BY run_seq LIMIT ?2;

-- name: entries_of_run_newest_first
-- Entries of one run after a position, the last one first.
SELECT idx, leaf FROM entry WHERE idx > ? AND run_id = ?3 ORDER BY run_seq DESC LIMIT ?2;

-- name: ledger_rows
-- Rows of the ledger view, oldest first.
SELECT
    session_id, turn_count, state_origin, input_hash, token_delta, execution_time_ms, pass_fail, breach_reason, created_at
FROM ledger LIMIT ?;

-- name: ledger_rows_of_run
-- Rows of the ledger view of one run, oldest first.
SELECT
    session_id, turn_count, state_origin, input_hash, token_delta, execution_time_ms, pass_fail, breach_reason, created_at
FROM ledger WHERE session_id = ?2 LIMIT ?1;

-- name: meta
-- Everything known of the store itself.
SELECT name, value FROM meta;

-- name: set_meta
-- Write one fact about the store itself.
INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value;

-- name: sizes
-- How many entries and root runs there are.
SELECT (SELECT count(*) FROM entry), (SELECT count(*) FROM run);
