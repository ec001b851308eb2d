"""Every benchmark in one command: `python -m benchmarks [NAME ...] [--json FILE]`.

Each runs in a process of its own, one after the other, so that none disturbs another. What a benchmark needs and does
not find here (a PostgreSQL server, recorded traces) is said, not passed over.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
IMPORT_ROUNDS = 7
IMPORT_MS_MAX = 150


def import_ms() -> dict[str, float]:
    """How long `import endstop` takes in a fresh interpreter, less the interpreter's own start, in milliseconds."""
    code = "import time; a = time.perf_counter(); import endstop; print((time.perf_counter() - a) * 1000)"
    found = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(IMPORT_ROUNDS)
    ]
    return {
        "median_ms": round(statistics.median(found), 1),
        "best_ms": round(min(found), 1),
        "to_reach_ms": IMPORT_MS_MAX,
    }


def run(name: str, place: Path) -> object:
    """One benchmark's figures; its own report goes to the terminal as it runs."""
    script = FOLDER / f"bench_{name}.py"
    target = place / f"{name}.json"
    takes_file = "--json FILE" in script.read_text(encoding="utf-8")
    command = [sys.executable, str(script), "--json", *([str(target)] if takes_file else [])]
    done = subprocess.run(command, stdout=None if takes_file else subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"failed": f"exit code {done.returncode}"}
    if takes_file:
        return json.loads(target.read_text(encoding="utf-8")) if target.exists() else {"skipped": "it says why above"}
    print(done.stdout)
    return json.loads(done.stdout)


def main() -> int:
    """Run what was asked for, or everything."""
    known = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"import, {', '.join(known)}; default: all")
    parser.add_argument("--json", type=Path, help="write all figures there")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - {"import", *known})
    if unknown:
        parser.error(f"no benchmark called {', '.join(unknown)}")
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in asked.names or ["import", *known]:
            print(f"== {name}", flush=True)
            figures[name] = import_ms() if name == "import" else run(name, Path(place))
            if name == "import":
                print(figures[name])
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 1 if any(isinstance(found, dict) and "failed" in found for found in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
