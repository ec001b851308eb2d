"""What a model call costs, in nano-dollars (10⁻⁹ US dollars), rounded up, from genai-prices' bundled table.

Rule: no price is ever guessed. A model that neither the caller's table nor the bundled one knows has price None, and
the guard refuses it where money is limited. Zero is a price only for what is declared free: scripts, and models that
run on one's own machine. The bundled table is never updated over the network from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Final

from endstop.errors import UsageError
from endstop.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from genai_prices.types import ModelInfo, ModelPrice, TieredPrices

    from endstop.core.model import Usage

__all__ = [
    "NO_TABLE",
    "InstalledPrices",
    "PriceTable",
    "TokenPrice",
    "price_nanos",
    "prices_installed",
    "worst_case_nanos",
]

NANOS_PER_DOLLAR: Final = 1_000_000_000
TOKENS_PER_MILLION: Final = 1_000_000

_FREE: Final = frozenset({"ollama", "scripted"})
# Ollama forwards these to a paid service of its own.
_NOT_LOCAL: Final = "-cloud"
_PROVIDER_IDS: Final = {
    "anthropic": "anthropic",
    "gemini": "google",
    "google": "google",
    "openai": "openai",
    "openai-chat": "openai",
    "openai-responses": "openai",
}
# Text goes in and comes out; these are the rates it can be charged at. Nothing here asks for a one-hour cache.
_INPUT_RATES: Final = (
    "input_mtok", "input_text_mtok", "cache_read_mtok", "cache_text_read_mtok", "cache_write_mtok",
    "cache_text_write_mtok", "cache_write_5m_mtok", "cache_text_write_5m_mtok",
)  # fmt: skip
_OUTPUT_RATES: Final = (
    "output_mtok", "output_text_mtok", "output_reasoning_mtok", "output_text_reasoning_mtok", "output_citation_mtok",
    "output_text_citation_mtok",
)  # fmt: skip
# A call that starts before a price change may be billed after it.
_PRICE_CHANGE_MARGIN: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrice:
    """The price of one model, in nano-dollars a token. Input covers cache reads and writes too: give the dearest."""

    input_nanos_per_token: int
    output_nanos_per_token: int

    def __post_init__(self) -> None:
        for name in ("input_nanos_per_token", "output_nanos_per_token"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                msg = f"{name} must be a whole number of nano-dollars, 0 or more"
                raise UsageError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices that the caller declares, by the model's full name, e.g. `openai:my-model`. They win over all others."""

    prices: Mapping[str, TokenPrice] = field(default_factory=dict)


NO_TABLE: Final = PriceTable()


def prices_installed() -> bool:
    """Whether the bundled price table is here (`pip install "endstop[prices]"`)."""
    try:
        import genai_prices.data_snapshot  # noqa: F401  # only whether it is there
    except ImportError:
        return False
    return True


def price_nanos(model: str, usage: Usage, *, table: PriceTable = NO_TABLE, now_us: int | None = None) -> int | None:
    """The price of `usage` at `model`, in nano-dollars, rounded up; None when the model has no known price.

    `now_us` (microseconds since 1970, default now) picks the prices of that moment. Usage whose parts exceed their
    whole is charged the worst case of its totals.
    """
    declared = _declared(model, table)
    if declared is not None:
        return _linear(declared, usage.input_tokens, usage.output_tokens)
    known = _find(model)
    if known is None:
        return None
    from genai_prices import Usage as PricedUsage

    price = known.get_prices(_moment(now_us))
    if _rates(price, _INPUT_RATES) and _rates(price, _OUTPUT_RATES):
        parts = usage.cache_read_tokens + usage.cache_write_tokens
        if parts <= usage.input_tokens and usage.reasoning_tokens <= usage.output_tokens:
            counted = PricedUsage(
                input_tokens=usage.input_tokens,
                output_tokens=usage.output_tokens,
                cache_read_tokens=usage.cache_read_tokens,
                cache_write_tokens=usage.cache_write_tokens,
                output_reasoning_tokens=usage.reasoning_tokens,
            )
            return _nanos(price.calc_price(counted)["total_price"])
    return worst_case_nanos(model, usage.input_tokens, usage.output_tokens, table=table, now_us=now_us)


def worst_case_nanos(
    model: str,
    input_tokens_max: int,
    output_tokens_max: int,
    *,
    table: PriceTable = NO_TABLE,
    now_us: int | None = None,
) -> int | None:
    """The most that a call with these token bounds can cost, in nano-dollars; None when the model has no known price.

    All input is charged at the dearest input rate (fresh, cache read, five-minute cache write), all output at the
    dearest output rate, in the dearest long-context tier within reach, at the dearest price in force now or a day
    from now. Service tiers that cost more are not in it: no client here asks for one.
    """
    declared = _declared(model, table)
    if declared is not None:
        return _linear(declared, input_tokens_max, output_tokens_max)
    known = _find(model)
    if known is None:
        return None
    worst: Decimal | None = None
    for price in _prices(known, _moment(now_us)):
        into = [_dearest(rate, input_tokens_max) for rate in _rates(price, _INPUT_RATES)]
        out = [_dearest(rate, input_tokens_max) for rate in _rates(price, _OUTPUT_RATES)]
        if not into or not out:
            return None
        dollars = (max(into) * input_tokens_max + max(out) * output_tokens_max) / TOKENS_PER_MILLION
        a_request = price.requests_kcount
        if isinstance(a_request, Decimal):
            dollars += a_request / 1_000
        worst = dollars if worst is None else max(worst, dollars)
    return None if worst is None else _nanos(worst)


def _declared(model: str, table: PriceTable) -> TokenPrice | None:
    if model in table.prices:
        return table.prices[model]
    prefix, _, rest = model.partition(":")
    if prefix in _FREE and not rest.endswith(_NOT_LOCAL):
        return TokenPrice(input_nanos_per_token=0, output_nanos_per_token=0)
    return None


def _linear(price: TokenPrice, input_tokens: int, output_tokens: int) -> int:
    return price.input_nanos_per_token * input_tokens + price.output_nanos_per_token * output_tokens


def _find(model: str) -> ModelInfo | None:
    """The bundled entry of a model; a name without a provider is matched by itself."""
    try:
        from genai_prices.data_snapshot import get_snapshot
    except ImportError:
        return None
    prefix, colon, rest = model.partition(":")
    if prefix in _FREE:
        return None
    provider = _PROVIDER_IDS.get(prefix, prefix) if colon else None
    try:
        return get_snapshot().find_provider_model(rest if colon else model, None, provider, None)[1]
    except LookupError:
        return None


def _prices(model: ModelInfo, now: datetime) -> Iterator[ModelPrice]:
    """Every set of prices that a call of now may be billed at; prices by the time of day all count."""
    from genai_prices.types import ModelPrice, StartDateConstraint

    if isinstance(model.prices, ModelPrice):
        yield model.prices
        return
    for moment in (now, now + _PRICE_CHANGE_MARGIN):
        # Later entries take precedence; the first that holds all day hides the ones before it.
        for entry in reversed(model.prices):
            constraint = entry.constraint
            if isinstance(constraint, StartDateConstraint) and not constraint.active(moment):
                continue
            yield entry.prices
            if constraint is None or isinstance(constraint, StartDateConstraint):
                break
        else:
            # None holds all day: the table then falls back to its first entry.
            yield from (entry.prices for entry in model.prices[:1])


def _rates(price: ModelPrice, names: tuple[str, ...]) -> list[Decimal | TieredPrices]:
    return [rate for name in names if (rate := getattr(price, name)) is not None]


def _dearest(rate: Decimal | TieredPrices, input_tokens_max: int) -> Decimal:
    """Dollars a million tokens, in the dearest tier that an input of at most this many tokens can reach."""
    if isinstance(rate, Decimal):
        return rate
    return max([rate.base, *(tier.price for tier in rate.tiers if input_tokens_max > tier.start)])


def _nanos(dollars: Decimal) -> int:
    return int((dollars * NANOS_PER_DOLLAR).to_integral_value(rounding=ROUND_CEILING))


def _moment(now_us: int | None) -> datetime:
    now = SystemClock().now_us() if now_us is None else now_us
    return datetime.fromtimestamp(now // 1_000_000, UTC)


class InstalledPrices:
    """The caller's table over the bundled one, as a guard uses them. Nothing is loaded before the first question."""

    def __init__(self, table: PriceTable = NO_TABLE) -> None:
        self._table = table

    def price_nanos(self, model: str, usage: Usage) -> int | None:
        """The price of a finished call in nano-dollars; None when the model has no known price."""
        return price_nanos(model, usage, table=self._table) if model else None

    def worst_case_nanos(self, model: str, input_tokens_max: int | None, output_tokens_max: int | None) -> int | None:
        """The most that a call can cost; None also when a bound is missing, because then there is no worst case."""
        if not model or input_tokens_max is None or output_tokens_max is None:
            return None
        return worst_case_nanos(model, input_tokens_max, output_tokens_max, table=self._table)
