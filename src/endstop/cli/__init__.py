"""The command line: one module a noun, arguments in, text or JSON out. Data goes to stdout, all else to stderr."""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """Run `endstop` with this process's arguments and give its exit code."""
    from endstop.cli.app import run

    return run()
