"""`endstop stop`: end a run from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from endstop.cli.codes import ExitCode
from endstop.cli.run_names import find_run
from endstop.cli.session import ACTOR, REASON, Session, examples, verb
from endstop.core.codec import envelope_json

if TYPE_CHECKING:
    from endstop.runtime.guard import Guard

__all__ = ["command"]

WAIT_SECONDS: Final = 60
WAIT_SECONDS_MAX: Final = 86_400
POLL_MS: Final = 20


@click.command(
    "stop", epilog=examples("endstop stop last --reason 'repeats itself'", "endstop stop RUN --wait --timeout 30")
)
@click.argument("run")
@REASON
@ACTOR
@click.option("--wait", is_flag=True, help="Wait until the calls in flight have settled.")
@click.option(
    "--timeout", "timeout_s", metavar="SECONDS", type=click.IntRange(1, WAIT_SECONDS_MAX), default=WAIT_SECONDS,
    show_default=True, help="How long to wait.",
)  # fmt: skip
@verb()
def command(session: Session, run: str, reason: str, actor: str, wait: bool, timeout_s: int) -> int:
    """End a run now. From then on no call of it starts, in any process; asking twice changes nothing.

    Async calls in flight are cancelled; others end by themselves. Without --wait they are only listed.
    """
    output = session.output
    guard = session.guard()
    record = find_run(guard, run)
    report = guard.stop(record.root_run_id, reason=reason, actor=actor)
    envelope = report.envelope
    if not output.as_json:
        if report.already:
            output.line(f"already ended: {record.root_run_id}, {envelope.terminal_reason}")
        else:
            output.line(f"requested: {record.root_run_id}, {envelope.terminal_reason}")
        for call_id, tool in report.in_flight:
            output.line(f"in flight: {tool} ({call_id})")
    left = report.in_flight if not wait else _settled(session, guard, record.root_run_id, timeout_s)
    if output.as_json:
        output.json(
            {
                "run_id": record.root_run_id, "requested": not report.already, "already_ended": report.already,
                "acknowledged": not left, "in_flight": [_call(*call) for call in report.in_flight],
                "still_in_flight": [_call(*call) for call in left], "envelope": envelope_json(envelope),
            }
        )  # fmt: skip
    elif not left:
        output.line("acknowledged: no call is in flight")
    if wait and left:
        output.note(f"endstop: {len(left)} calls are still in flight after {timeout_s} s; the run stays stopped")
        return ExitCode.TIMEOUT
    return ExitCode.DONE


def _settled(session: Session, guard: Guard, run_id: str, timeout_s: int) -> tuple[tuple[str, str], ...]:
    """Wait for the calls in flight; gives those that are left."""
    until_us = session.clock.now_us() + timeout_s * 1_000_000
    while (left := guard.show(run_id).in_flight) and session.clock.now_us() < until_us:
        session.clock.sleep_ms(POLL_MS)
    return left


def _call(call_id: str, tool: str) -> dict[str, object]:
    return {"call_id": call_id, "tool": tool}
