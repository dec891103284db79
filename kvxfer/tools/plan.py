"""What a transfer between two engines would be, without making it: for each pair of ranks bytes, pieces, route, time.

Who sends what, the chunk grid and the route come from the code that a worker runs, with the settings that a worker
would have; the time is a prediction of `routes.cost`.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kvxfer.config import Config, parse_size
from kvxfer.errors import ConfigError, GeometryError, TokensError
from kvxfer.geometry import LAYOUTS, CopyPlan, Holders, PairPlan, TransferPlan, check_tokens, sample
from kvxfer.names import MAX_ROWS
from kvxfer.plans.pairs import LISTED, BoundPlan, choose_and_cut, fit, in_place_bytes, usual_chunks
from kvxfer.plans.routes import Choice, Profile, RouteSupport, acceptable, choose
from kvxfer.protocol.messages import Route
from kvxfer.tools.engine import Engine, EngineLayout, ModelCache
from kvxfer.tools.shown import size

__all__ = [
    "Forecast",
    "PairForecast",
    "PieceSizes",
    "forecast",
    "nearest",
    "parse_engine",
    "parse_tokens",
    "with_bandwidths",
]

# --- engines on a command line


def nearest(name: str, known: Sequence[str]) -> str:
    """What to say of a name that is not one of the known ones."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def parse_engine(text: str, option: str) -> EngineLayout:
    """Read an engine: `key=value` and flags, separated by commas; what is not said has the default.

    `pp` is a number of stages or the layers of each (`pp=20+12`), `layout` a name or an axis string.

    Args:
        text: What was written.
        option: Where, for messages.

    Raises:
        ConfigError: Naming the option, the value and the nearest known name.
    """
    given: dict[str, Any] = {}
    for term in filter(None, (term.strip() for term in text.split(","))):
        name, separator, value = (part.strip() for part in term.partition("="))
        if name not in _KEYS:
            raise ConfigError(f"{option} {text}: {name!r} is unknown: {nearest(name, list(_KEYS))}")
        field, read = name.replace("-", "_"), _KEYS[name]
        if field in given:
            raise ConfigError(f"{option} {text}: {name} is given twice")
        if (read is None) == bool(separator):
            form = f"{name} alone, without a value" if read is None else f"{name}=VALUE"
            raise ConfigError(f"{option} {text}: {term!r} is not understood: write {form}")
        try:
            given[field] = True if read is None else read(value)
        except ValueError as error:
            raise ConfigError(f"{option} {text}: {name}={value} is not possible: {error}") from error
    try:
        return EngineLayout(**given)
    except GeometryError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


def parse_tokens(text: str) -> range:
    """Read a token range: `N` for the first N tokens, or `A:B` where the first A are held already, `N:N` where all are.

    Raises:
        TokensError: If it is none.
    """
    first, separator, last = text.partition(":")
    try:
        found = range(_whole(first), _whole(last)) if separator else range(_whole(first))
    except ValueError as error:
        raise TokensError(f"--tokens {text} is not possible: {error}, or A:B") from error
    if found.stop < max(found.start, 1):
        raise TokensError(f"--tokens {text} is not possible: that is no token; give N or A:B with A <= B")
    return found


_MOST_BANDWIDTH: Final = 10**15


def with_bandwidths(profile: Profile, text: str) -> Profile:
    """A profile with other bandwidths: `25GB` a second for all that goes by NIXL, or `staged=25GB,mapped=300GB`.

    Raises:
        ConfigError: If a route is unknown, or a bandwidth is none.
    """
    by_nixl = "staged", "direct", "pull"
    routes, said = dict(profile.routes), dict[str, int]()
    for term in text.split(","):
        name, separator, value = (part.strip() for part in term.rpartition("="))
        try:
            given = parse_size(value)
        except ValueError as error:
            raise ConfigError(f"--bandwidth {text}: {value!r} is not bytes a second: {error}") from error
        for one in [name] if separator else by_nixl:
            route = next((route for route in routes if route.name.lower() == one), None)
            if route is None or not 1 <= given <= _MOST_BANDWIDTH:
                known = ", ".join(route.name.lower() for route in routes)
                raise ConfigError(
                    f"--bandwidth {text:.80}: {term[:80]!r} is not understood: routes are {known}, "
                    "and a bandwidth 1B to 1000TB a second"
                )
            routes[route], said[one] = replace(routes[route], bytes_per_s=float(given)), given
    words = ", ".join(f"{one} at {given / 1e9:g} GB/s" for one, given in said.items())
    return replace(profile, hardware=f"{profile.hardware}; bandwidths as given: {words}", routes=routes)


def _whole(text: str) -> int:
    if not (text.strip().isdecimal() and text.isascii()):
        raise ValueError("give a whole number")
    return int(text)


def _stages(text: str) -> int | list[int]:
    counts = [_whole(term) for term in text.split("+")]
    return counts if len(counts) > 1 else counts[0]


def _layout(text: str) -> str:
    if " " not in text and text not in LAYOUTS:
        raise ValueError(f"it is no axis string and no layout: {nearest(text, list(LAYOUTS))}")
    return text


_KEYS: Final[Mapping[str, Callable[[str], Any] | None]] = {
    "tp": _whole,
    "pp": _stages,
    "cp": _whole,
    "cp-chunk": _whole,
    "block": _whole,
    "kernel-block": _whole,
    "layout": _layout,
    "cross-layer": None,
}
"""What may be said of an engine, by the fields of `EngineLayout`, and how its value is read; None for a flag."""


# --- the forecast

_LISTED: Final = 1 << 18
"""Up to so many pieces of a pair are listed one by one; of more a part is, and the rest is taken to be alike."""
_SMALLEST_POOL: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """Contiguous pieces of a copy, neighbours merged."""

    count: int
    smallest: int
    median: int  # by number
    largest: int
    sampled: bool  # these numbers come from a part of the pieces

    @classmethod
    def of(cls, plan: CopyPlan) -> "PieceSizes":
        """Count and measure; of very many pieces those of some rows of every segment."""
        found = sample(plan, _LISTED)
        order = np.argsort(found.nbytes, kind="stable")
        sizes, numbers = found.nbytes[order], np.cumsum(found.weights[order])
        middle = int(np.searchsorted(numbers, float(numbers[-1]) / 2))
        count, sampled = round(found.count), plan.pieces > _LISTED
        return cls(count, int(sizes[0]), int(sizes[middle]), int(sizes[-1]), sampled)


@dataclass(frozen=True, slots=True)
class PairForecast:
    """What would go from one prefill rank to one decode rank."""

    prefill_rank: int
    decode_rank: int
    bytes: int
    pieces: PieceSizes
    chunks: int
    choice: Choice
    predicted_s: float  # if the pair were alone

    def to_json(self) -> dict[str, Any]:
        """As `kvxfer plan --json` prints it."""
        return {
            "prefill_rank": self.prefill_rank,
            "decode_rank": self.decode_rank,
            "bytes": self.bytes,
            "pieces": self.pieces.count,
            "piece_bytes": {"min": self.pieces.smallest, "median": self.pieces.median, "max": self.pieces.largest},
            "sampled": self.pieces.sampled,
            "chunks": self.chunks,
            "route": self.choice.route.name.lower(),
            "why": self.choice.why,
            "fallback": self.choice.fallback,
            "predicted_s": self.predicted_s,
        }


@dataclass(frozen=True, eq=False)
class Forecast:
    """A transfer of one request between two engines."""

    prefill: Engine
    decode: Engine
    tokens: range
    profile: Profile  # what the predicted times rest on
    pairs: tuple[PairForecast, ...]  # between which something moves, by decode rank

    @property
    def bytes(self) -> int:
        """Bytes over all pairs."""
        return sum(pair.bytes for pair in self.pairs)

    def to_json(self) -> dict[str, Any]:
        """As `kvxfer plan --json` prints it."""
        model = self.prefill.model
        return {
            "model": {
                "type": model.model_type,
                "layers": len(model.layers),
                "groups": list(dict.fromkeys(part.group for part in self.prefill.parts)),
                "dtype": self.prefill.dtype,
                "notes": list(model.notes),
            },
            "tokens": {"start": self.tokens.start, "stop": self.tokens.stop},
            "prefill": _engine_json(self.prefill),
            "decode": _engine_json(self.decode),
            "profile": {"name": self.profile.name, "hardware": self.profile.hardware},
            "pairs": [pair.to_json() for pair in self.pairs],
            "bytes": self.bytes,
            "slowest_pair_s": max((pair.predicted_s for pair in self.pairs), default=0.0),
        }

    def summary(self) -> list[str]:
        """What `kvxfer plan` prints above its table."""
        model, start, stop = self.prefill.model, self.tokens.start, self.tokens.stop
        lines = [
            f"{model.model_type}: {len(model.layers)} layers, {self.prefill.dtype}, "
            + (f"tokens {start} to {stop - 1}" if start < stop else f"no tokens of {stop}, all are held already"),
            f"{size(self.bytes)} between {len(self.pairs)} pairs of ranks",
        ]
        for side, engine in (("prefill", self.prefill), ("decode", self.decode)):
            layout = engine.layout
            lines.append(f"{side}: {len(engine.ranks)} ranks, blocks of {layout.block} tokens: {layout.axis_string}")
        lines.append(f"times are predictions for a pair that is alone; measured on {self.profile.hardware}")
        return [*lines, *(f"note: {note}" for note in model.notes)]


def _engine_json(engine: Engine) -> dict[str, Any]:
    layout = engine.layout
    return {
        "ranks": len(engine.ranks),
        "tp": layout.tp,
        "pp": [len(stage) for stage in layout.stages(len(engine.model.layers))],
        "cp": layout.cp,
        "block": layout.block,
        "axes": layout.axis_string,
    }


def forecast(
    model: ModelCache,
    prefill: EngineLayout,
    decode: EngineLayout,
    tokens: range,
    *,
    config: Config,
    profile: Profile,
    dtype: str | None = None,
    one_host: bool = False,
) -> Forecast:
    """Plan the transfer of one request.

    Args:
        model: What both engines run.
        prefill: How the one that holds the request divides and lays out its cache.
        decode: How the other does.
        tokens: What is fetched; the request ends with it, and the tokens before it are held already.
        config: Settings of every worker. All pairs are taken to be connected, and to trust each other unless
            `trust="none"`.
        profile: What the predicted times rest on.
        dtype: Of K, V and latent rows; by default the model's.
        one_host: Whether the prefill ranks can map the memory of the decode ranks.

    Raises:
        GeometryError: If the model cannot be divided so, or the two layouts hold what cannot be copied.
        TokensError: If the range is reversed, ends at token 0, or is longer than can be planned.
        RefusedError: If no route is left, or no chunk is small enough.
    """
    check_tokens(tokens, may_be_empty=True)
    for side, layout in (("prefill", prefill), ("decode", decode)):
        if (ids := -(-tokens.stop // (layout.block * layout.cp))) > MAX_ROWS:
            raise TokensError(
                f"{side}: {tokens.stop} tokens are {ids} blocks on a rank, and {MAX_ROWS} are the most that can be "
                "planned: take fewer tokens, or larger blocks"
            )
    pool = max(_SMALLEST_POOL, *(4 * tokens.stop // layout.block for layout in (prefill, decode)))
    src = _engine("prefill", model, prefill, dtype, pool)
    dst = _engine("decode", model, decode, dtype, pool)
    src_spans = src.spans(tokens.stop, aligned=decode.block)
    dst_spans = dst.spans(tokens.stop, aligned=prefill.block, draw=1)
    found, holders = list[PairForecast](), Holders(src.ranks)
    for decode_rank, need in enumerate(dst.ranks):
        for prefill_rank, selections in enumerate(holders.resolve(need, rank=decode_rank)):
            if selections:
                plan = PairPlan(src.ranks[prefill_rank], need, selections).bind(src_spans, dst_spans, tokens)
                if plan.whole.bytes:  # interleaved tokens: a rank may hold none of a short request
                    support = _support(config, one_host=one_host)
                    found.append(_pair(prefill_rank, decode_rank, plan, config, profile, support))
    return Forecast(src, dst, tokens, profile, tuple(found))


def _engine(side: str, model: ModelCache, layout: EngineLayout, dtype: str | None, pool: int) -> Engine:
    try:
        return Engine(model, layout, dtype or model.dtype, pool)
    except GeometryError as error:
        raise GeometryError(f"{side}: {error}") from error


def _support(config: Config, *, one_host: bool) -> RouteSupport:
    """What two workers with these settings can do together."""
    in_place = config.trust != "none" and config.route != "staged"
    routes = {Route.DIRECT, Route.PULL, *([Route.MAPPED] if one_host else [])} if in_place else set[Route]()
    return RouteSupport(frozenset({Route.STAGED, *routes} if config.arena_bytes else routes))


def _pair(
    prefill_rank: int, decode_rank: int, plan: TransferPlan, config: Config, profile: Profile, support: RouteSupport
) -> PairForecast:
    """One pair, decided as `prefill/sender.py` decides it."""
    copy, nbytes = plan.whole.copy(), plan.whole.bytes

    def cut(route: Route) -> BoundPlan:
        if route is Route.STAGED:
            target = limit = min(config.chunk_bytes, config.send_bytes, config.receive_bytes)
        else:
            target, limit = in_place_bytes(route, plan, config.in_place_chunk_bytes), None
        return fit(plan, target_bytes=target, limit_bytes=limit, listed=route in LISTED)

    choice, bound = choose_and_cut(
        acceptable(config.route, support),
        support,
        lambda wanted: choose(
            config.route,
            support,
            wanted,
            nbytes=nbytes,
            pieces=lambda: plan.merged_pieces,
            seconds=lambda route, pieces: profile.routes[route].seconds(
                nbytes=nbytes, chunks=usual_chunks(config, route, nbytes), pieces=pieces
            ),
        ),
        cut,
    )
    pieces = PieceSizes.of(copy)
    seconds = profile.routes[choice.route].seconds(nbytes=nbytes, chunks=bound.grid.chunks, pieces=pieces.count)
    return PairForecast(prefill_rank, decode_rank, nbytes, pieces, bound.grid.chunks, choice, seconds)
