"""`endstop doctor`: is the store sound, and is everything here that a run needs?"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from endstop.cli.codes import ExitCode
from endstop.cli.figures import duration, seconds_time
from endstop.cli.output import Column
from endstop.cli.policy import POLICY_FILE
from endstop.cli.session import ACTOR, REASON, Session, examples, sqlite_path, verb
from endstop.cli.timeline import event_of
from endstop.errors import EndstopError, PolicyInvalidError, UsageError
from endstop.store.port import RestorableStore, quarantine_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from endstop.store.port import Store, StoreFacts

__all__ = ["Finding", "command"]

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

PYTHON_MIN: Final = (3, 11)
# The first release without the fault that could reset a write-ahead log.
SQLITE_MIN: Final = (3, 51, 3)
# A clock that stands before this release was written is wrong.
EARLIEST_US: Final = 1_767_225_600_000_000
AHEAD_US_MAX: Final = 60_000_000
MILLIS: Final = 1_000
PRIVATE_MODES: Final = ("0600", "0o600", "600")
FULL: Final = ("full", "extra", "2", "3")
EXTRAS: Final = {
    "models": ("pydantic-ai-slim", "pydantic-ai"),
    "prices": ("genai-prices",),
    "examples": ("httpx", "selectolax"),
}
_COLUMNS: Final = (Column(name="check"), Column(name="verdict"), Column(name="found"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: what was looked at, the verdict (ok, warn or fail), and what was found."""

    check: str
    verdict: str
    found: str


@click.command(
    "doctor",
    epilog=examples(
        "endstop doctor",
        "endstop doctor --store sqlite:///state.db --json",
        "endstop doctor --accept-restore --reason 'compared with the bank'",
    ),
)
@click.option(
    "--accept-restore", is_flag=True,
    help="Take a restored store as it is: side effects go on. Needs a reason; compare it with the targets first.",
)  # fmt: skip
@REASON
@ACTOR
@verb()
def command(session: Session, accept_restore: bool, reason: str, actor: str) -> int:
    """Check the store, the clock, the policy here, and what is installed. Ends with 1 when a check fails.

    A store that is not there yet is not made.
    """
    if accept_restore:
        _accept(session, reason, actor)
    findings = [_python(), *_store(session), _policy(), *_extras()]
    failed = any(finding.verdict == FAIL for finding in findings)
    if session.output.as_json:
        session.output.json({"ok": not failed, "checks": [asdict(finding) for finding in findings]})
    else:
        session.output.table(_COLUMNS, [(item.check, item.verdict, item.found) for item in findings])
    return ExitCode.INTERNAL if failed else ExitCode.DONE


def _accept(session: Session, reason: str, actor: str) -> None:
    """Lift the quarantine of a restored store."""
    if not reason.strip():
        msg = "accepting a restored store needs a reason: --reason"
        raise UsageError(msg)
    store = session.guard().store
    if quarantine_of(store) is None or not isinstance(store, RestorableStore):
        msg = "this store is not in quarantine: there is nothing to accept"
        raise UsageError(msg)
    store.accept_restore(actor=actor, reason=reason)


def _restored(store: Store) -> Finding:
    wrong = quarantine_of(store)
    if wrong is None:
        return Finding(check="restore", verdict=OK, found="the store is the one that was written last")
    return Finding(
        check="restore", verdict=FAIL,
        found=f"{wrong}. Side effects are refused. Compare it with the targets, then --accept-restore --reason …",
    )  # fmt: skip


def _judged(check: str, good: bool, found: str, *, otherwise: str = FAIL) -> Finding:
    return Finding(check=check, verdict=OK if good else otherwise, found=found)


def _python() -> Finding:
    here = sys.version_info
    return _judged("python", here[:2] >= PYTHON_MIN, f"{here.major}.{here.minor}.{here.micro}")


def _store(session: Session) -> Iterator[Finding]:
    url, path = session.store_url, sqlite_path(session.store_url)
    if path is not None and not path.exists():
        yield Finding(check="store", verdict=WARN, found=f"none at {path} yet; the first run makes it")
        yield _clock(session, None)
        return
    try:
        store = session.guard().store
        facts = store.facts().result()
        newest = store.entries(limit=1, newest_first=True).result()
    except EndstopError as error:
        yield Finding(check="store", verdict=FAIL, found=str(error))
        return
    yield Finding(check="store", verdict=OK, found=f"{url}: {facts.runs} runs, {facts.entries} entries")
    if facts.kind == "sqlite":
        yield from _sqlite(facts)
    yield _judged("integrity", facts.integrity == "ok", facts.integrity)
    yield Finding(check="schema", verdict=OK, found=f"version {facts.schema_version}")
    yield _restored(store)
    yield _owners(store)
    yield _clock(session, event_of(newest[0]).at_us if newest else None)


def _sqlite(facts: StoreFacts) -> Iterator[Finding]:
    needed = ".".join(str(part) for part in SQLITE_MIN)
    yield _judged(
        "sqlite version", _parts(facts.engine_version) >= SQLITE_MIN, f"{facts.engine_version}, {needed} is needed"
    )
    yield _judged("journal mode", facts.journal_mode.lower() == "wal", facts.journal_mode)
    yield _judged("synchronous", str(facts.synchronous).lower() in FULL, str(facts.synchronous))
    yield _judged(
        "file mode", facts.file_mode in PRIVATE_MODES, f"{facts.file_mode}; 0600 keeps it to its owner"
    )  # fmt: skip


def _parts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _owners(store: Store) -> Finding:
    folder = store.owners_dir
    if folder is None:
        return Finding(check="workers' locks", verdict=OK, found="none: this store is not shared")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-"):
            pass
    except OSError as error:
        return Finding(check="workers' locks", verdict=FAIL, found=f"{folder} cannot be written: {error.strerror}")
    return Finding(check="workers' locks", verdict=OK, found=f"{folder} can be written")


def _clock(session: Session, newest_us: int | None) -> Finding:
    now_us = session.clock.now_us()
    if now_us < EARLIEST_US:
        return Finding(check="clock", verdict=FAIL, found=f"{seconds_time(now_us)} is before this release was made")
    if newest_us is not None and newest_us > now_us + AHEAD_US_MAX:
        ahead = duration((newest_us - now_us) // MILLIS)
        return Finding(
            check="clock", verdict=FAIL, found=f"the newest entry is {ahead} ahead of {seconds_time(now_us)}"
        )
    return Finding(check="clock", verdict=OK, found=seconds_time(now_us))


def _policy() -> Finding:
    from endstop.runtime.policy_file import load_policy, policy_warnings

    if not Path(POLICY_FILE).exists():
        return Finding(check="policy", verdict=OK, found=f"no {POLICY_FILE} here: the defaults hold")
    try:
        policy = load_policy(POLICY_FILE, environ=os.environ)
    except PolicyInvalidError as error:
        return Finding(check="policy", verdict=FAIL, found=str(error))
    warnings = policy_warnings(policy)
    found = f"{POLICY_FILE}: {len(warnings)} warnings; see `endstop policy check`" if warnings else POLICY_FILE
    return _judged("policy", not warnings, found, otherwise=WARN)


def _extras() -> Iterator[Finding]:
    for extra, distributions in EXTRAS.items():
        installed = [f"{name} {found}" for name in distributions if (found := _version(name)) is not None]
        # Of the model layer one of two distributions is enough; of the others all are needed.
        complete = bool(installed) if extra == "models" else len(installed) == len(distributions)
        found_text = ", ".join(installed) if complete else f"not installed: pip install 'endstop[{extra}]'"
        yield _judged(f"extra {extra}", complete, found_text, otherwise=WARN)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
