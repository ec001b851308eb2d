"""Records that are filled by slot are the records they would be otherwise."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from endstop.core.events import Observation, Proposal
from endstop.core.model import Execute
from endstop.core.observe import Measured
from endstop.core.reasons import Effect, Status
from endstop.core.slots import filled_by_slot
from tests.core.kit import proposal_of

FILLED = (Proposal, Observation, Execute, Measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    must: int
    may: str = "default"
    made: list[int] = field(default_factory=list)


@filled_by_slot
@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    must: int
    may: str = "default"
    made: list[int] = field(default_factory=list)


def values(record: Plain | Filled) -> list[object]:
    return [getattr(record, item.name) for item in fields(record)]


def test_it_takes_the_same_keywords_and_fills_the_same_fields() -> None:
    for given in ({"must": 1}, {"must": 1, "may": "x"}, {"must": 1, "may": "x", "made": [2]}):
        assert values(Filled(**given)) == values(Plain(**given))
    assert Filled(must=1) == Filled(must=1)
    assert repr(Filled(must=1)) == repr(Plain(must=1)).replace("Plain", "Filled")


def test_a_factory_makes_a_new_value_each_time() -> None:
    assert Filled(must=1).made is not Filled(must=1).made


@pytest.mark.parametrize("given", [{}, {"must": 1, "unknown": 2}])
def test_what_is_missing_or_unknown_is_a_type_error(given: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        Filled(**given)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(TypeError):
        Filled(1)  # type: ignore[call-arg]  # keywords only


@pytest.mark.parametrize("record", FILLED)
def test_the_records_of_a_call_keep_their_signature(record: type[object]) -> None:
    """A field that is added to the class must be an argument of what was made from it."""
    assert list(inspect.signature(record).parameters) == [item.name for item in fields(record)]  # type: ignore[arg-type]
    assert not hasattr(record, "__post_init__")


def test_they_stay_frozen_and_can_be_copied_replaced_and_pickled() -> None:
    proposal = proposal_of(n=1)
    with pytest.raises(FrozenInstanceError):
        proposal.tool = "other"  # type: ignore[misc]  # the point of the test
    assert replace(proposal, call_id="c2").call_id == "c2"
    assert copy.copy(proposal) == proposal
    assert pickle.loads(pickle.dumps(proposal)) == proposal
    seen = Observation(tool="t", effect=Effect.READ, fingerprint="f", call_id="c", status=Status.PROGRESS, answer="a")
    assert seen.news
    assert not seen.changed
