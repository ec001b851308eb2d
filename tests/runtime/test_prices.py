"""Prices are whole nano-dollars, rounded up, never guessed, and the worst case is one."""

from __future__ import annotations

import sys
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.core.model import Usage
from endstop.errors import UsageError
from endstop.runtime.prices import PriceTable, TokenPrice, price_nanos, prices_installed, worst_case_nanos

pytest.importorskip("genai_prices", reason='the price table is an extra: pip install "endstop[prices]"')

# 2026-11-30T00:00:00Z, so that a newer table does not change what is expected.
NOW_US = 1_795_996_800_000_000
MODELS = ("anthropic:claude-sonnet-4-5", "openai:gpt-4o", "google:gemini-2.5-pro", "gemini:gemini-2.5-flash", "gpt-5")


def test_the_table_is_found() -> None:
    assert prices_installed()


def test_a_known_model_is_priced_to_the_nano_dollar() -> None:
    # $2.50 and $10.00 a million tokens.
    assert price_nanos("openai:gpt-4o", Usage(input_tokens=1_000, output_tokens=10), now_us=NOW_US) == 2_600_000


def test_cached_input_costs_its_own_rate() -> None:
    plain = price_nanos("anthropic:claude-sonnet-4-5", Usage(input_tokens=1_000), now_us=NOW_US)
    read = price_nanos("anthropic:claude-sonnet-4-5", Usage(input_tokens=1_000, cache_read_tokens=1_000), now_us=NOW_US)
    written = price_nanos(
        "anthropic:claude-sonnet-4-5", Usage(input_tokens=1_000, cache_write_tokens=1_000), now_us=NOW_US
    )
    assert (plain, read, written) == (3_000_000, 300_000, 3_750_000)


def test_the_price_agrees_with_the_librarys_own_arithmetic() -> None:
    from genai_prices import Usage as PricedUsage
    from genai_prices import calc_price

    usage = Usage(input_tokens=1_234_567, output_tokens=98_765, cache_read_tokens=4_321)
    for model in MODELS:
        provider, _, name = model.rpartition(":")
        library = calc_price(
            PricedUsage(input_tokens=1_234_567, output_tokens=98_765, cache_read_tokens=4_321),
            name,
            provider_id={"gemini": "google"}.get(provider, provider) or None,
        )
        nanos = library.total_price * Decimal(1_000_000_000)
        assert price_nanos(model, usage) == -int(-nanos // 1)


@pytest.mark.parametrize("model", ["openai:no-such-model-at-all", "nobody:gpt-4o", "no-such-model", "openai:"])
def test_an_unknown_model_has_no_price(model: str) -> None:
    assert price_nanos(model, Usage(input_tokens=1)) is None
    assert worst_case_nanos(model, 1, 1) is None


def test_only_what_is_declared_local_is_free() -> None:
    for model in ("scripted:turns.jsonl", "ollama:qwen3"):
        assert price_nanos(model, Usage(input_tokens=10**6)) == 0
        assert worst_case_nanos(model, 10**6, 10**6) == 0
    assert worst_case_nanos("ollama:gpt-oss:120b-cloud", 1, 1) is None


def test_a_declared_price_wins_over_the_table_and_over_free() -> None:
    price = TokenPrice(input_nanos_per_token=2, output_nanos_per_token=5)
    table = PriceTable(prices={"openai:gpt-4o": price, "ollama:qwen3": price, "openai:my-model": price})
    for model in table.prices:
        assert price_nanos(model, Usage(input_tokens=10, output_tokens=3), table=table) == 35
        assert worst_case_nanos(model, 10, 3, table=table) == 35
    with pytest.raises(UsageError, match="input_nanos_per_token"):
        TokenPrice(input_nanos_per_token=-1, output_nanos_per_token=0)


def test_a_model_that_is_priced_for_input_only_has_no_price_for_a_conversation() -> None:
    assert worst_case_nanos("openai:text-embedding-3-small", 10, 10) is None


def test_the_worst_case_charges_cache_writes_and_the_long_context_tier_only_within_reach() -> None:
    # Sonnet 4.5: cache writes at $3.75, output at $15; above 200 000 tokens $7.50 and $22.50.
    assert worst_case_nanos("anthropic:claude-sonnet-4-5", 200_000, 100, now_us=NOW_US) == 751_500_000
    assert worst_case_nanos("anthropic:claude-sonnet-4-5", 200_001, 100, now_us=NOW_US) == 1_502_257_500


def test_usage_whose_parts_exceed_the_whole_is_charged_the_worst_case() -> None:
    usage = Usage(input_tokens=100, output_tokens=10, cache_read_tokens=101)
    assert price_nanos("openai:gpt-4o", usage) == worst_case_nanos("openai:gpt-4o", 100, 10)


@given(
    model=st.sampled_from(MODELS),
    fresh=st.integers(0, 500_000),
    read=st.integers(0, 100_000),
    written=st.integers(0, 100_000),
    output=st.integers(0, 50_000),
    slack=st.integers(0, 50_000),
)
def test_no_usage_within_the_bounds_costs_more_than_the_worst_case(
    model: str, fresh: int, read: int, written: int, output: int, slack: int
) -> None:
    total = fresh + read + written
    usage = Usage(
        input_tokens=total, output_tokens=output, cache_read_tokens=read, cache_write_tokens=written,
        reasoning_tokens=output // 2,
    )  # fmt: skip
    price = price_nanos(model, usage, now_us=NOW_US)
    worst = worst_case_nanos(model, total + slack, output + slack, now_us=NOW_US)
    assert price is not None
    assert worst is not None
    assert price <= worst


def test_no_model_of_the_table_has_a_worst_case_below_its_price() -> None:
    from genai_prices.data_snapshot import get_snapshot

    usage = Usage(input_tokens=300_000, output_tokens=20_000, cache_read_tokens=90_000, cache_write_tokens=60_000)
    priced = 0
    for provider in get_snapshot().providers:
        for entry in provider.models:
            name = f"{provider.id}:{entry.id}"
            price = price_nanos(name, usage, now_us=NOW_US)
            worst = worst_case_nanos(name, 300_000, 20_000, now_us=NOW_US)
            assert (price is None) == (worst is None), name
            if price is not None and worst is not None:
                priced += 1
                assert price <= worst, name
    assert priced > 1_000


def test_without_the_table_only_declared_and_local_models_have_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    assert not prices_installed()
    assert price_nanos("openai:gpt-4o", Usage(input_tokens=1)) is None
    assert worst_case_nanos("openai:gpt-4o", 1, 1) is None
    assert worst_case_nanos("ollama:qwen3", 1, 1) == 0
