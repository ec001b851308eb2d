"""Every error says who must act, whether an effect is possible and whether to retry, and survives pickle and copy."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator

import pytest

from endstop import errors
from endstop.core.envelope import Envelope
from endstop.core.reasons import NextAction, Reason

ENVELOPE = Envelope(
    run_id="r1", generation=1, terminal_reason=Reason.STEP_CAP, next_allowed_action=NextAction.RESUME_AFTER_CHANGE
)


def _classes(root: type[BaseException] = errors.EndstopError) -> Iterator[type[errors.EndstopError]]:
    yield root  # type: ignore[misc]  # the walk starts at EndstopError
    for child in root.__subclasses__():
        yield from _classes(child)


TREE = sorted((kind for kind in _classes() if kind.__module__ == errors.__name__), key=lambda kind: kind.__name__)


def make(kind: type[BaseException]) -> BaseException:
    if kind is errors.OutcomeUnknownError:
        return errors.OutcomeUnknownError("what happened", "op-1")
    if kind is errors.ProviderError:
        return errors.ProviderError("what happened", "rate_limit", 500)
    if kind in (errors.RunStopped, errors.RunHalted):
        return kind("what happened", ENVELOPE)
    return kind("what happened")


def test_the_tree_is_exported_whole_and_sorted() -> None:
    assert errors.__all__ == sorted(errors.__all__)
    assert {kind.__name__ for kind in TREE} | {"InvariantError", "RunHalted"} == set(errors.__all__)


def test_the_tree_drawn_in_the_docstring_is_the_tree() -> None:
    drawn = set(re.findall(r"\b([A-Z]\w+(?:Error|Stopped|Halted))\b", errors.__doc__ or ""))
    assert drawn - {"AssertionError"} == set(errors.__all__)


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_a_class_answers_the_three_questions(kind: type[errors.EndstopError]) -> None:
    assert kind.acts in {"caller", "operator", "reviewer", "agent"}
    assert kind.effect in {"none", "possible"}
    assert isinstance(kind.retryable, bool)
    assert kind.__doc__


def test_an_effect_is_possible_exactly_where_nobody_knows() -> None:
    possible = {kind for kind in TREE if kind.effect == "possible"}
    assert possible == {errors.OutcomeUnknownError, errors.CommitUnknownError}
    assert not any(kind.retryable for kind in possible)


def test_every_class_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in TREE]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)
    assert all("code" in vars(kind) for kind in TREE)


@pytest.mark.parametrize("kind", [*TREE, errors.InvariantError, errors.RunHalted], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_survives_pickle_and_copy(kind: type[BaseException], again: object) -> None:
    error = make(kind)
    back = again(error)  # type: ignore[operator]  # one of three functions
    assert type(back) is kind
    assert str(back) == str(error) == "what happened"
    assert vars(back) == vars(error)


def test_errors_that_carry_something_give_it_back() -> None:
    assert make(errors.OutcomeUnknownError).operation_id == "op-1"  # type: ignore[attr-defined]  # made just above
    provider = make(errors.ProviderError)
    assert isinstance(provider, errors.ProviderError)
    assert (provider.fault, provider.retry_after_ms) == ("rate_limit", 500)
    for kind in (errors.RunStopped, errors.RunHalted):
        assert make(kind).envelope is ENVELOPE  # type: ignore[attr-defined]  # both carry one


def test_a_halt_is_no_exception_that_an_agent_may_swallow() -> None:
    assert not issubclass(errors.RunHalted, Exception)
    assert issubclass(errors.RunStopped, Exception)

    def careless() -> None:
        try:
            raise make(errors.RunHalted)
        except Exception:  # what an agent's loop does
            return

    with pytest.raises(errors.RunHalted):
        careless()
