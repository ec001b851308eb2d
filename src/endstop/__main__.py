"""`python -m endstop` is `endstop`."""

from __future__ import annotations

import sys

from endstop.cli import main

if __name__ == "__main__":
    sys.exit(main())
