"""`endstop init`: a starter policy, an example task that runs as it is, and a line for .gitignore."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import click

from endstop.cli.session import Session, examples, verb

__all__ = ["FRAMEWORKS", "command", "frameworks_found"]

IGNORED: Final = ".endstop/"
EXAMPLE: Final = "example-task"
# Distribution names, and what people call them.
FRAMEWORKS: Final = {
    "anthropic": "Anthropic SDK", "openai": "OpenAI SDK", "google-genai": "Google Gen AI SDK",
    "langgraph": "LangGraph", "langchain": "LangChain", "openai-agents": "OpenAI Agents SDK",
    "pydantic-ai": "Pydantic AI", "pydantic-ai-slim": "Pydantic AI", "google-adk": "Google ADK", "crewai": "CrewAI",
    "agent-framework": "Microsoft Agent Framework", "autogen-agentchat": "AutoGen", "strands-agents": "Strands Agents",
    "smolagents": "smolagents", "llama-index-core": "LlamaIndex", "claude-agent-sdk": "Claude Agent SDK",
    "mcp": "MCP SDK", "fastmcp": "FastMCP",
}  # fmt: skip

TASK: Final = """\
# An example of what `endstop run` carries out. It works as it is: endstop run example-task/task.toml
task = "Say how many files there are beside this task, and name the largest."

# What the run is for, in a person's words, before the first model call.
[spec]
what_it_does = "Looks at the files of the example's folder."
what_it_does_not = "It changes nothing and looks nowhere else."
done_looks_like = "One sentence with the number of files and the name of the largest."

[model]
# A scripted model replays turns.jsonl: no key and no network. For a real one, write its name and put the key into the
# environment: "anthropic:MODEL", "openai:MODEL", "ollama:MODEL".
name = "scripted:turns.jsonl"

# What is not set here has its default: `endstop policy show` lists the limits.
[limits]
steps_max = 10
turns_max = 5

[tools.list_files]
function = "endstop_example_tools:list_files"
effect = "read"

# [run]
# The same key never starts a second run, however often cron fires.
# key = "example-{iso_week}"
"""
TURNS: Final = """\
{"tool_calls": [{"id": "c1", "name": "list_files", "args": {}}], "usage": {"input_tokens": 420, "output_tokens": 18}}
{"text": "There are three files; the largest is task.toml.", "usage": {"input_tokens": 510, "output_tokens": 15}}
"""
TOOLS: Final = '''\
"""The example's only tool: a plain function. Its name, parameters and docstring are what the model sees."""

from pathlib import Path


def list_files() -> list[dict[str, object]]:
    """List the files beside this module, with their sizes in bytes."""
    folder = Path(__file__).resolve().parent
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [{"name": path.name, "bytes": path.stat().st_size} for path in files]
'''


@click.command("init", epilog=examples("endstop init", "endstop init --force"))
@click.option("--force", is_flag=True, help="Write the files anew, also where they were changed.")
@verb(uses_store=False)
def command(session: Session, force: bool) -> None:
    """Write endstop.toml, an example task and a line for .gitignore into this folder.

    What is there already is kept; doing it twice changes nothing.
    """
    from endstop.runtime.policy_file import policy_template

    frameworks = frameworks_found()
    files = {
        Path("endstop.toml"): policy_template(frameworks),
        Path(EXAMPLE, "task.toml"): TASK,
        Path(EXAMPLE, "turns.jsonl"): TURNS,
        Path(EXAMPLE, "endstop_example_tools.py"): TOOLS,
    }
    written: list[str] = []
    kept: list[str] = []
    for path, text in files.items():
        (written if _write(path, text, force=force) else kept).append(path.as_posix())
    (written if _ignore() else kept).append(".gitignore")
    output = session.output
    if output.as_json:
        output.json({"written": written, "kept": kept, "frameworks": list(frameworks)})
        return
    for path_text in written:
        output.line(f"written  {path_text}")
    for path_text in kept:
        output.line(f"kept     {path_text}")
    output.note(f"endstop: try it with `endstop run {EXAMPLE}/task.toml`")


def frameworks_found() -> tuple[str, ...]:
    """The agent frameworks and SDKs that are installed beside Endstop, with their versions."""
    found: dict[str, str] = {}
    for distribution, name in FRAMEWORKS.items():
        try:
            found.setdefault(name, f"{name} {version(distribution)}")
        except PackageNotFoundError:
            continue
    return tuple(found.values())


def _write(path: Path, text: str, *, force: bool) -> bool:
    """Whether the file was written. One that is there is left alone, unless `force`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and (not force or path.read_text(encoding="utf-8", errors="replace") == text):
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _ignore() -> bool:
    """Keep the store out of version control: its ledger may hold what belongs to nobody else."""
    path = Path(".gitignore")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if any(line.strip().rstrip("/") in (".endstop", "/.endstop") for line in text.splitlines()):
        return False
    head = text if not text or text.endswith("\n") else text + "\n"
    path.write_text(f"{head}{IGNORED}\n", encoding="utf-8")
    return True
