"""Records made through an open twin are the records they would be otherwise."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from endstop.core.events import Observation, Proposal
from endstop.core.model import Execute
from endstop.core.observe import Measured
from endstop.core.slots import filled_by_slot, open_twin, sealed
from tests.core.kit import proposal_of


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


@filled_by_slot
@dataclass(frozen=True, slots=True, kw_only=True)
class Easy:
    may: str = "default"


OPEN = open_twin(Plain)
GIVEN: list[dict[str, object]] = [{"must": 1}, {"must": 1, "may": "x"}, {"must": 1, "may": "x", "made": [2]}]


def twin_made(**given: object) -> Plain:
    return sealed(OPEN(**given), Plain)  # type: ignore[arg-type]  # keywords from a table


@pytest.mark.parametrize("given", GIVEN)
def test_both_ways_fill_the_same_fields(given: dict[str, object]) -> None:
    plain = Plain(**given)  # type: ignore[arg-type]  # keywords from a table
    assert twin_made(**given) == plain
    filled = Filled(**given)  # type: ignore[arg-type]  # keywords from a table
    assert [getattr(filled, item.name) for item in fields(Plain)] == [plain.must, plain.may, plain.made]
    assert repr(filled) == repr(plain).replace("Plain", "Filled")


def test_a_factory_makes_a_new_value_each_time() -> None:
    assert twin_made(must=1).made is not twin_made(must=1).made
    assert Filled(must=1).made is not Filled(must=1).made


@pytest.mark.parametrize("given", [{}, {"must": 1, "unknown": 2}])
def test_what_is_missing_or_unknown_is_a_type_error(given: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        twin_made(**given)
    with pytest.raises(TypeError):
        Filled(**given)  # type: ignore[arg-type]  # the point of the test
    assert Easy().may == "default"


@pytest.mark.parametrize("record", [Proposal, Observation, Measured, Execute])
def test_the_records_of_a_call_have_nothing_that_a_twin_would_leave_out(record: type[object]) -> None:
    assert not hasattr(record, "__post_init__")
    names = [item.name for item in fields(record)]  # type: ignore[arg-type]  # each is a dataclass
    assert [item.name for item in fields(open_twin(record))] == names  # type: ignore[arg-type]  # the same


@pytest.mark.parametrize("record", [proposal_of(n=1), twin_made(must=1), Filled(must=1, may="x")])
def test_what_was_sealed_is_frozen_and_can_be_copied_replaced_and_pickled(record: Plain) -> None:
    name = fields(record)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(record, name, "other")
    assert copy.copy(record) == record
    assert pickle.loads(pickle.dumps(record)) == record
    assert getattr(replace(record, **{name: "other"}), name) == "other"  # type: ignore[arg-type]  # by name
    assert {record.__class__, type(copy.deepcopy(record))} == {type(record)}
