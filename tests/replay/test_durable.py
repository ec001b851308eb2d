"""A durable run and the replay of its own ledger: the step that is named is the one that the live guard refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import endstop as es
from endstop.replay.replayer import ReplaySettings, replay_file
from endstop.replay.report import RunReport
from tests.replay.recordings import NO_CAPS, document, lines

SPEC = es.Spec(what_it_does="looks", what_it_does_not="writes", done_looks_like="seen")
POLICY = es.Policy(
    limits=NO_CAPS,
    tools={
        "crm.update": es.ToolPolicy(effect="write", idempotency_key="{id}"),
        "cursor": es.ToolPolicy(effect="read", progress="at"),
    },
)
Script = list[tuple[str, dict[str, object], object]]


def play(guard: es.Guard, script: Script) -> tuple[str, es.Reason, list[str]]:
    """Run `script` under the durable guard until it stops; gives the run, the reason and the tools that ran."""
    ran: list[str] = []

    def tool_of(name: str, answer: object) -> object:
        def tool(**_: object) -> object:
            ran.append(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return tool

    with pytest.raises(es.RunStopped) as stopped, guard.run(SPEC) as run:
        for name, args, answer in script:
            try:
                run.call(tool_of(name, answer), args, tool=name)
            except RuntimeError:
                continue
    return stopped.value.envelope.run_id, stopped.value.envelope.terminal_reason, ran


SCRIPTS: dict[str, Script] = {
    "same call": [("look", {"q": "x"}, "none")] * 5,
    "cycle": [("a", {}, "1"), ("b", {}, "2")] * 4,
    "long cycle": [("a", {}, "1"), ("b", {}, "2"), ("c", {}, "3")] * 4,
    "no progress": [("cursor", {"n": n}, {"at": 7, "rows": n}) for n in range(6)],
    "failures": [("build", {"n": n}, RuntimeError("no space")) for n in range(5)],
    "committed write": [("crm.update", {"id": 1}, "ok"), ("look", {}, "x"), ("crm.update", {"id": 1}, "ok")],
}


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[es.Guard]:
    with es.open(f"sqlite:///{tmp_path}/state.db", policy=POLICY) as opened:
        yield opened


def leaves(guard: es.Guard, run_id: str) -> list[bytes]:
    return [entry.leaf for entry in guard.store.entries(run_id=run_id).result()]


def replayed(path: Path, policy: es.Policy = POLICY) -> RunReport:
    found = replay_file(path, ReplaySettings(policy=policy))
    assert found.error is None
    assert found.skipped == ()
    (report,) = found.runs
    return report


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_replay_of_a_ledger_stops_where_the_live_run_did(guard: es.Guard, tmp_path: Path, name: str) -> None:
    run_id, reason, ran = play(guard, SCRIPTS[name])
    report = replayed(lines(tmp_path / "entries.jsonl", leaves(guard, run_id)))
    assert report.format == "endstop"
    assert report.stop is not None
    assert report.stop.reason is reason
    # What was let through before the stop ran, and nothing else did.
    assert report.stop.call_index == len(ran)
    assert report.outcome == reason.value


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_plain_recording_of_the_same_calls_stops_there_too(guard: es.Guard, tmp_path: Path, name: str) -> None:
    _, reason, ran = play(guard, SCRIPTS[name])
    records = [
        {"tool": tool, "args": args, "error": f"RuntimeError: {answer}"} if isinstance(answer, Exception)
        else {"tool": tool, "args": args, "result": answer}
        for tool, args, answer in SCRIPTS[name]
    ]  # fmt: skip
    report = replayed(lines(tmp_path / "calls.jsonl", records))
    assert report.stop is not None
    assert (report.stop.reason, report.stop.call_index) == (reason, len(ran))


def test_a_store_file_is_read_with_all_its_runs(guard: es.Guard, tmp_path: Path) -> None:
    for name in ("same call", "cycle"):
        play(guard, SCRIPTS[name])
    with guard.run(SPEC) as run:
        run.call(lambda: 1, {}, tool="look")
        run.complete(output="done")
    found = replay_file(tmp_path / "state.db", ReplaySettings(policy=POLICY))
    assert [run.outcome for run in found.runs] == ["same_call_repeat", "short_cycle", "complete"]
    assert [None if run.stop is None else run.stop.reason.value for run in found.runs] == [
        "same_call_repeat", "short_cycle", None,
    ]  # fmt: skip


def test_entries_as_the_command_line_prints_them_are_read(guard: es.Guard, tmp_path: Path) -> None:
    run_id, reason, _ = play(guard, SCRIPTS["same call"])
    entries = [
        {"index": entry.index, "entry": es_json(entry.leaf)} for entry in guard.store.entries(run_id=run_id).result()
    ]
    for path in (
        lines(tmp_path / "tail.jsonl", entries),
        document(tmp_path / "show.json", {"ledger": "l", "entries": entries}),
    ):
        report = replayed(path)
        assert report.stop is not None
        assert report.stop.reason is reason


def es_json(leaf: bytes) -> object:
    import orjson

    return orjson.loads(leaf)


def test_another_policy_judges_the_same_answers(guard: es.Guard, tmp_path: Path) -> None:
    run_id, _, _ = play(guard, SCRIPTS["same call"])
    path = lines(tmp_path / "entries.jsonl", leaves(guard, run_id))
    lax = es.Policy(limits=es.Limits(same_call_max=5, steps_max=100))
    assert replayed(path, lax).stop is None


def test_tokens_turns_and_pauses_of_a_ledger_are_kept(guard: es.Guard, tmp_path: Path) -> None:
    with guard.run(SPEC) as run:
        for _ in range(2):
            with run.model_call(model="scripted:x", input_tokens_max=50, output_tokens_max=50) as turn:
                turn.record(input_tokens=30, output_tokens=12)
        run.complete(output="done")
    report = replayed(lines(tmp_path / "entries.jsonl", leaves(guard, run.run_id)))
    assert (report.totals.turns, report.totals.tokens, report.totals.calls) == (2, 84, 0)
    assert report.totals.time_us < 10**9
