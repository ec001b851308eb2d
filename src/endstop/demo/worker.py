"""The demonstration's agent as a process of its own, so that it can be killed in mid-call.

    python -m endstop.demo.worker --store URL --policy FILE --crm URL --contact ID --run-id ID --delay-ms N

It ends by itself when the run ends; the demonstration kills it before that.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from endstop.demo.agent import run_guarded
from endstop.runtime.guard import open_guard
from endstop.runtime.policy_file import load_policy

__all__ = ["main"]


def main() -> None:
    """Run the guarded agent until it ends."""
    parser = argparse.ArgumentParser(prog="python -m endstop.demo.worker", description="Run the demonstration's agent.")
    parser.add_argument("--store", required=True, help="URL of the store")
    parser.add_argument("--policy", required=True, type=Path, help="the policy file")
    parser.add_argument("--crm", required=True, help="base URL of the CRM")
    parser.add_argument("--contact", required=True, help="the contact to update")
    parser.add_argument("--run-id", required=True, help="the run to start")
    parser.add_argument("--delay-ms", type=int, default=0, help="how late the CRM answers")
    given = parser.parse_args()
    with open_guard(given.store, policy=load_policy(given.policy)) as guard:
        run_guarded(guard, given.crm, given.contact, run_id=given.run_id, delay_ms=given.delay_ms)


if __name__ == "__main__":
    main()
