"""The demonstration's agent: one job, one tool, and a model that does what a public incident's model did.

After a successful update it proposes the same update again, under a new call id each time, until somebody's iteration
cap ends it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core.model import Spec
from endstop.demo.crm import CrmError, update_contact
from endstop.errors import NotAppliedError, UsageError
from endstop.loop.agent import AgentLoop
from endstop.loop.conversation import ToolAnswer, ToolAnswers, UserText
from endstop.loop.scripted import ScriptedModel
from endstop.runtime.context import current

if TYPE_CHECKING:
    from collections.abc import Callable

    from endstop.loop.agent import LoopResult
    from endstop.loop.conversation import Item
    from endstop.runtime.guard import Guard

__all__ = ["ITERATIONS_MAX", "POLICY_TOML", "SPEC", "TOOL", "run_guarded", "run_without_guard"]

ITERATIONS_MAX: Final = 8
TOOL: Final = "crm.update"
STAGE: Final = "won"
VERSION: Final = 7
TASK: Final = f'Set the contact to stage "{STAGE}".'
SPEC: Final = Spec(
    what_it_does="Sets one contact of the CRM to another stage, once.",
    what_it_does_not="It touches no other contact and sends no update twice.",
    done_looks_like="The CRM's table of writes holds exactly one write for this contact.",
)
# The guard's own turn cap is the naive loop's cap, so that it is not a smaller number that makes the difference.
POLICY_TOML: Final = f"""\
[limits]
turns_max = {ITERATIONS_MAX}

[tools."{TOOL}"]
effect = "write"
idempotency_key = "{{contact_id}}:{{version}}"
"""


def repeating_model(contact_id: str, first_call_id: str) -> ScriptedModel:
    """The incident's model: the same update in every turn. A repeated turn gets call ids of its own."""
    args = {"contact_id": contact_id, "stage": STAGE, "version": VERSION}
    call = {"id": first_call_id, "name": TOOL, "args": args}
    usage = {"input_tokens": 410, "output_tokens": 38}
    return ScriptedModel([{"tool_calls": [call], "usage": usage}], after="repeat", name="scripted:incident")


def crm_tool(crm_url: str, *, delay_ms: int = 0) -> Callable[..., object]:
    """The agent's tool. It knows nothing of a guard but the idempotency key that it passes on when there is one."""

    def update(contact_id: str, stage: str, version: int) -> dict[str, object]:
        """Set a contact's stage in the CRM.

        Args:
            contact_id: The contact.
            stage: The new stage.
            version: The version of the contact that this update makes.
        """
        try:
            return update_contact(crm_url, contact_id, stage, version, _key(), delay_ms=delay_ms)
        except CrmError as error:
            if error.status is not None and 400 <= error.status < 500:  # noqa: PLR2004  # HTTP's own classes
                raise NotAppliedError(str(error)) from error
            raise

    return update


def _key() -> str | None:
    try:
        return current().idempotency_key
    except UsageError:
        return None


def run_without_guard(crm_url: str, contact_id: str) -> int:
    """What many agents are: model, tool, model, tool, up to an iteration cap. Gives how many model turns it took."""
    return asyncio.run(_naive_loop(crm_url, contact_id))


async def _naive_loop(crm_url: str, contact_id: str) -> int:
    model, tool = repeating_model(contact_id, "call-1"), crm_tool(crm_url)
    items: list[Item] = [UserText(text=TASK)]
    for turns in range(1, ITERATIONS_MAX + 1):
        turn = await model.respond(system="", items=items, tools=(), output_tokens_max=None, on_text=None)
        items.append(turn)
        if not turn.tool_requests:
            return turns
        answers = []
        for request in turn.tool_requests:
            args = {} if isinstance(request.args, str) else request.args
            content = orjson.dumps(tool(**args)).decode()
            answers.append(ToolAnswer(call_id=request.call_id, name=request.name, content=content))
        items.append(ToolAnswers(answers=tuple(answers)))
    return ITERATIONS_MAX


def run_guarded(
    guard: Guard,
    crm_url: str,
    contact_id: str,
    *,
    run_id: str | None = None,
    first_call_id: str = "call-1",
    delay_ms: int = 0,
) -> LoopResult:
    """The same model and the same tool under the guard. An existing `run_id` is joined.

    `delay_ms` makes the CRM answer late, after it has applied the update.
    """
    loop = AgentLoop(
        guard,
        model=repeating_model(contact_id, first_call_id),
        tools={TOOL: crm_tool(crm_url, delay_ms=delay_ms)},
    )
    return loop.run(TASK, SPEC, run_id=run_id)
