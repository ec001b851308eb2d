"""The contract of `endstop.store.port.Store`, as tests that every store must pass.

Subclass `StoreContract` under a name that starts with `Test`, give it `open_store`, and let pytest collect it; or call
`run_contract` from anything. Nothing here needs pytest. A store whose records outlive it, or that several may share,
also gives `open_again`.
"""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING

from endstop.testing.store_contract_ledger import LedgerContract
from endstop.testing.store_contract_runs import RunContract

if TYPE_CHECKING:
    from collections.abc import Callable

    from endstop.store.port import Store

__all__ = ["StoreContract", "run_contract"]


class StoreContract(RunContract, LedgerContract):
    """Every promise of the port as one test. A subclass gives `open_store`, and `open_again` where it can."""


def run_contract(
    open_store: Callable[[], Store], open_again: Callable[[Store], Store] | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Run every test of the contract; `open_store` gives a new, empty store each time.

    Gives the names of the tests that passed, and of those that were left out because there is no `open_again`. Raises
    AssertionError, or what a store raised, at the first broken promise.
    """
    passed: list[str] = []
    left_out: list[str] = []
    for name in sorted(dir(StoreContract)):
        if not name.startswith("test_"):
            continue
        tests = _Tests(open_store, open_again)
        try:
            getattr(tests, name)()
        except unittest.SkipTest:
            left_out.append(name)
        else:
            passed.append(name)
    return tuple(passed), tuple(left_out)


class _Tests(StoreContract):
    def __init__(self, opener: Callable[[], Store], again: Callable[[Store], Store] | None) -> None:
        self._opener = opener
        self._again = again

    def open_store(self) -> Store:
        """A new, empty store."""
        return self._opener()

    def open_again(self, store: Store) -> Store:
        """The same records once more."""
        return super().open_again(store) if self._again is None else self._again(store)
