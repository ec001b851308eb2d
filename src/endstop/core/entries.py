"""Ledger entries: the exact bytes of each leaf.

Profile: one JSON object in ASCII, keys sorted, values text, whole numbers of at most 53 bits, booleans, null, arrays
and objects; no floats; at most `LEAF_BYTES_MAX` bytes. Within this profile the bytes are those of RFC 8785. An entry
carries digests and codes, never arguments, answers or other people's words; `fold_entry` in `endstop.core.refold`
reads it back.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import orjson

from endstop.errors import InvariantError

__all__ = ["ENTRY_TYPES", "INT_MAX", "LEAF_BYTES_MAX", "entry_bytes", "safe_name"]

VERSION: Final = 1
LEAF_BYTES_MAX: Final = 65_535
INT_MAX: Final = 2**53 - 1
NAME_CHARS_MAX: Final = 80

ENTRY_TYPES: Final = (
    "ledger_open", "run_open", "run_join", "run_leave", "call_intent", "call_refused", "call_replayed", "result",
    "lost", "turn_intent", "turn_refused", "turn", "handoff", "child", "checkpoint", "user_input", "control", "stop",
    "complete", "resume", "recover", "operation",
)  # fmt: skip

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.:/@#+\- ]{0,80}")
_OTHER_SIGNS: Final = re.compile(r"[^A-Za-z0-9_.:/@#+\- ]")


def safe_name(text: str) -> str:
    """A name or id as an entry may hold it: ASCII, no control characters, at most 80 long.

    Plain names stay as they are. Others keep what is plain of them and get a digest, so that two stay two.
    """
    if _PLAIN_NAME.fullmatch(text):
        return text
    tail = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
    return _OTHER_SIGNS.sub("?", text)[: NAME_CHARS_MAX - 13] + "~" + tail


def entry_bytes(
    kind: str,
    *,
    ledger: str,
    run_id: str,
    seq: int,
    ts_us: int,
    actor: str,
    policy: str,
    generation: int,
    fields: dict[str, object],
) -> bytes:
    """The leaf for one event. Raises InvariantError when `fields` leave the profile: a bug, never bad input."""
    body: dict[str, object] = {
        "v": VERSION, "type": kind, "ledger": ledger, "run": run_id, "seq": seq, "ts_us": ts_us, "actor": actor,
        "policy": policy, "gen": generation,
    }  # fmt: skip
    for name, value in fields.items():
        if value is None or value is False or value == "":
            continue
        body[name] = value
    leaf = orjson.dumps(body, option=orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER)
    if len(leaf) > LEAF_BYTES_MAX or not leaf.isascii():
        msg = f"an entry of type {kind} leaves the ledger's profile ({len(leaf)} bytes)"
        raise InvariantError(msg)
    return leaf
