"""The caches of all ranks of an engine, from its model's config and how the engine lays its cache out.

Nothing is allocated: tensors get made-up addresses, far enough apart that no two look like neighbours. That is enough
to plan transfers without torch, a GPU or the model.
"""

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, islice, product
from math import gcd, lcm, prod
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.geometry.axes import Axis, Interleave, TensorSpec, expand_layout, parse_axes
from kvxfer.geometry.cache import CacheGeometry
from kvxfer.geometry.rows import Span
from kvxfer.names import CONVERTIBLE, MAX_LAYERS, MAX_TOKENS, MAX_WIDTH, MAX_WORLD, lazy

__all__ = [
    "ITEM_BYTES",
    "KNOWN_TYPES",
    "Engine",
    "EngineLayout",
    "ModelCache",
    "Part",
    "dtype_name",
    "from_hf_config",
    "read_model",
    "scattered",
]

# --- models
#
# Only the JSON is read; transformers is not needed. What is not known is refused by name. A model type that is not
# listed here passes for plain attention, with a note that says so, if nothing in its config speaks against it.

ITEM_BYTES: Final[Mapping[str, int]] = {**CONVERTIBLE, "int8": 1, "uint8": 1}
"""Bytes of one element, by torch's name of the dtype."""

_SHORT: Final = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
_DEFAULT_DTYPE: Final = "bfloat16"
_INDEX_BLOCK: Final = 128  # the indexer of DeepSeek V3.2 stores a float32 scale for so many 8-bit values


@dataclass(frozen=True, slots=True)
class Part:
    """What one layer keeps for each token, or, as state, for each request."""

    group: str  # block-address space, as in `CacheTensor`
    # state parts whose names agree up to the first dot (`conv.x`, `conv.B`) lie side by side in the rows of one tensor
    name: str
    kv: tuple[str, ...]  # ("k", "v"), or ("",) where there are no two halves
    units: int  # what tensor parallelism divides: heads, or groups of channels; 0 if every rank keeps all of it
    dim: int  # elements of each coordinate
    unit: int = 1  # coordinates of the head axis in each of them: 1 for heads
    dtype: str = ""  # torch's name; empty for the dtype of the cache
    window: int | None = None  # only so many last tokens are kept
    state: bool = False  # one slot a request, no tokens
    dim_first: bool = False  # state whose dim axis is outside of its head axis


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The cache of a model, before it is divided among ranks."""

    model_type: str
    dtype: str
    layers: tuple[tuple[Part, ...], ...]  # the parts of each; empty for a layer without a cache
    notes: tuple[str, ...] = ()  # what was assumed, in words


_Layers: TypeAlias = list[tuple[Part, ...]]


def read_model(config: Mapping[str, Any] | str | Path) -> ModelCache:
    """Read a Hugging Face config.

    Args:
        config: The config as a mapping, or the path of a `config.json` or of the folder that holds one. Of a
            multimodal model the `text_config` counts.

    Raises:
        GeometryError: If it cannot be read, lacks a key, contradicts itself, or the model keeps something that is not
            known here.
    """
    given = dict(config) if isinstance(config, Mapping) else _load(Path(config))
    outer = _Config(given)
    text = given.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise outer.fail(f"text_config is {text!r}, but must be an object")
    if text is not None:
        said = {key: value for key, value in cast("Mapping[str, Any]", text).items() if value is not None}
        outer = _Config({"model_type": outer.model_type, "dtype": outer.dtype} | said)
    outer = _Config({**_DEFAULTS.get(outer.model_type, {}), **outer.values})
    if outer.values.get("per_layer_config"):
        raise outer.fail("per_layer_config lets layers differ in ways that are not known here; use CacheTensor")
    reader = _READERS.get(outer.model_type)
    notes: tuple[str, ...] = ()
    if reader is None:
        reader = _plain
        outer.refuse_signs()
        notes = (f"model type {outer.model_type!r} is not known here; plain attention in every layer is assumed",)
    layers = reader(outer)
    if not any(layers):
        raise GeometryError(f"config of model type {outer.model_type!r}: no layer keeps a cache")
    return ModelCache(outer.model_type, outer.dtype, tuple(layers), notes)


def dtype_name(text: str) -> str:
    """The name that torch gives a dtype, from it or a short one (`bf16`, `fp16`, `fp8`).

    Raises:
        GeometryError: If it is unknown.
    """
    name = text.strip().removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in ITEM_BYTES:
        raise GeometryError(f"dtype {text!r} is unknown; use one of {', '.join((*ITEM_BYTES, *_SHORT))}")
    return name


def _load(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise GeometryError(f"{file} cannot be read: {error.strerror}; give a config.json, or its folder") from error
    except ValueError as error:
        raise GeometryError(f"{file} is not JSON: {error}") from error
    except RecursionError as error:
        raise GeometryError(f"{file} is not the config of a model: it is nested too deeply to be read") from error
    if not isinstance(found, dict):
        raise GeometryError(f"{file} is not the config of a model: it holds a {type(found).__name__}, not an object")
    return cast("dict[str, Any]", found)


class _Config:
    """A config with checked access: every complaint names the model type and the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values: Final = values
        named = values.get("model_type")
        if not isinstance(named, str) or not named:
            found = f"its model_type is {named!r}" if named else "it has no model_type"
            raise GeometryError(f"this is not the config of a model: {found}")
        self.model_type: Final = named
        named = values.get("dtype") or values.get("torch_dtype") or _DEFAULT_DTYPE
        self.dtype: Final = dtype_name(str(named))

    def fail(self, problem: str) -> GeometryError:
        return GeometryError(f"config of model type {self.model_type!r}: {problem}")

    def maybe(self, *keys: str, most: int = MAX_WIDTH) -> int | None:
        """The first of these keys that is set."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise self.fail(f"{key} is {value!r}, but must be a whole number from 1 on")
            if value > most:
                raise self.fail(f"{key} is {value}, but {most} is the most that can be planned")
            return value
        return None

    def number(self, *keys: str, most: int = MAX_WIDTH) -> int:
        found = self.maybe(*keys, most=most)
        if found is None:
            raise self.fail(f"{' or '.join(keys)} is missing")
        return found

    def words(self, *keys: str) -> list[str] | None:
        """The first of these keys that is set, which must be to a list of words."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise self.fail(f"{key} is {value!r}, but must be a list")
            return [str(word) for word in cast("Sequence[object]", value)]
        return None

    def layer_count(self) -> int:
        return self.number("num_hidden_layers", most=MAX_LAYERS)

    def kinds(self) -> list[str] | None:
        """What the layers are, where the config lists it."""
        found = self.words("layer_types", "layers_block_type")
        if found is not None and len(found) != (self.maybe("num_hidden_layers", most=MAX_LAYERS) or len(found)):
            raise self.fail(f"layer_types lists {len(found)} layers, but num_hidden_layers is {self.layer_count()}")
        return found

    def attention(self, window: int | None = None) -> Part:
        """K and V of one layer."""
        heads = self.number("num_attention_heads")
        kv_heads = self.maybe("num_key_value_heads") or heads
        dim = self.maybe("attention_head_dim", "head_dim")
        if dim is None:
            hidden = self.number("hidden_size")
            if hidden % heads:
                raise self.fail(f"head_dim is missing, and hidden_size {hidden} is no multiple of {heads} heads")
            dim = hidden // heads
        return Part("default" if window is None else "window", "", ("k", "v"), kv_heads, dim, window=window)

    def refuse_signs(self) -> None:
        """Refuse a config of an unknown model type that speaks of anything but plain attention."""
        for key, value in self.values.items():
            if _SIGNS.search(key) and (value or key in _TELLING):
                raise self.fail(
                    f"this model type is not known, and {key} = {value!r} says that its cache is more than plain K and "
                    "V; describe it with CacheTensor"
                )


_SIGNS: Final = re.compile(
    r"(?:^|_)(?:kv_lora|q_lora|index_|mamba|ssm|state_size|conv_|linear_|recurrent|lru_|rwkv|retention|delta|hybrid"
    r"|attn_layer|layers_block_type|block_types|full_attn|kv_shared|global_head_dim|num_global|v_head_dim|compress"
    r"|attention_chunk|cross_attention|multi_query|num_kv_heads|attention_groups|block_configs|attn_type|is_encoder_decoder|encoder_layers|kv_channels|k_eq_v)"
)
_TELLING: Final = frozenset({"attention_k_eq_v"})
"""Keys of models whose layers differ in the size of their heads, whatever the value."""


def _plain(config: _Config) -> _Layers:
    """Attention in every layer, some of it perhaps over a sliding window."""
    count, window = (
        config.layer_count(),
        config.maybe("sliding_window", most=MAX_TOKENS) if config.values.get("sliding_window") else None,
    )
    if config.values.get("use_sliding_window") is False:
        window = None
    kinds = config.kinds()
    if kinds is None:
        kinds = _windowed(config, count) if window is not None else ["full_attention"] * count
    unknown = set(kinds) - {"full_attention", "attention", "sliding_attention"}
    if unknown:
        raise config.fail(f"layers of type {min(unknown)!r} are not known")
    if window is None and "sliding_attention" in kinds:
        raise config.fail("there are layers of type 'sliding_attention', but sliding_window is missing")
    return [(config.attention(window if kind == "sliding_attention" else None),) for kind in kinds]


def _windowed(config: _Config, count: int) -> list[str]:
    """Which layers have a window, where only the model type says it."""
    if config.model_type in _ALL_WINDOWED:
        return ["sliding_attention"] * count
    if config.model_type in {"qwen2", "qwen3"}:
        first = config.number("max_window_layers")
        return ["full_attention" if layer < first else "sliding_attention" for layer in range(count)]
    pattern = 2 if config.model_type in {"gemma2", "gpt_oss"} else config.maybe("sliding_window_pattern")
    if pattern is None:
        raise config.fail("sliding_window is set, but layer_types does not say which layers have the window")
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(count)]


_ALL_WINDOWED: Final = ("mistral", "mixtral", "phi3", "phimoe", "qwen3_moe")


def _latent(config: _Config) -> _Layers:
    """MLA: a latent row for each token, which all heads share; some models also keep rows of an indexer."""
    kinds = config.kinds() or []
    unknown = set(kinds) - {"full_attention", "attention", "indexed_attention"}
    if unknown:
        raise config.fail(f"layers of type {min(unknown)!r} are not known")
    rows = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
    latent = Part("default", "", ("",), 0, rows)
    index = config.maybe("index_head_dim")
    if index is None:
        return [(latent,)] * config.layer_count()
    if index % _INDEX_BLOCK:
        raise config.fail(f"index_head_dim is {index}, but is known only as a multiple of {_INDEX_BLOCK}")
    indexer = Part("default", "indexer", ("",), 0, index + 4 * index // _INDEX_BLOCK, dtype="uint8")
    return [(latent, indexer) if own else (latent,) for own in _own_indexers(config)]


def _own_indexers(config: _Config) -> list[bool]:
    """Which layers have an indexer of their own."""
    count, types = config.layer_count(), config.words("indexer_types")
    if types is not None:
        if len(types) != count or set(types) - {"full", "shared"}:
            raise config.fail(f"indexer_types must say 'full' or 'shared' for each of {count} layers")
        return [kind == "full" for kind in types]
    if config.values.get("index_topk_pattern") or (config.maybe("index_topk_freq") or 1) > 1:
        raise config.fail("layers share indexers, but indexer_types does not say which")
    return [True] * count


def _state(name: str, units: int, unit: int, dim: int, dtype: str, *, dim_first: bool = False) -> Part:
    return Part("state", name, ("",), units, dim, unit, dtype, state=True, dim_first=dim_first)


def _state_dtype(config: _Config) -> str:
    """What the recurrent state is stored as, which some models keep wider than the rest."""
    named = config.values.get("mamba_ssm_cache_dtype") or config.values.get("mamba_ssm_dtype")
    return dtype_name(str(named)) if named and named != "auto" else config.dtype


def _mamba1(config: _Config) -> tuple[Part, ...]:
    channels = config.maybe("intermediate_size") if config.model_type == "mamba" else None
    if channels is None:
        channels = config.number("mamba_expand", "expand") * config.number("hidden_size")
    rows = config.number("mamba_d_conv", "conv_kernel") - 1
    size = config.number("mamba_d_state", "state_size")
    return (
        _state("conv", channels, 1, rows, config.dtype, dim_first=True),
        _state("ssm", channels, 1, size, _state_dtype(config)),
    )


def _mamba2(config: _Config) -> tuple[Part, ...]:
    heads = config.number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    pure = config.model_type == "mamba2"
    dim = config.number(*(("head_dim",) if pure else ("mamba_head_dim", "mamba_d_head", "mamba_headdim")))
    groups = config.number("n_groups", "mamba_n_groups", "mamba_ngroups")
    size = config.number("ssm_state_size", "mamba_d_state", "state_size")
    rows, dtype = config.number("conv_kernel", "mamba_d_conv") - 1, config.dtype
    return (
        _state("conv.x", heads, dim, rows, dtype, dim_first=True),
        _state("conv.B", groups, size, rows, dtype, dim_first=True),
        _state("conv.C", groups, size, rows, dtype, dim_first=True),
        _state("ssm", heads, 1, dim * size, _state_dtype(config)),
    )


def _delta(config: _Config) -> tuple[Part, ...]:
    """Gated delta rule: convolutions of queries, keys and values, and a matrix a head."""
    keys, values = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
    key_dim, value_dim = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
    rows, dtype = config.number("linear_conv_kernel_dim") - 1, config.dtype
    return (
        _state("conv.q", keys, key_dim, rows, dtype, dim_first=True),
        _state("conv.k", keys, key_dim, rows, dtype, dim_first=True),
        _state("conv.v", values, value_dim, rows, dtype, dim_first=True),
        _state("ssm", values, 1, value_dim * key_dim, _state_dtype(config)),
    )


_RECURRENT: Final[Mapping[str, Callable[[_Config], tuple[Part, ...]]]] = {
    **dict.fromkeys(("jamba", "mamba"), _mamba1),
    **dict.fromkeys(("nemotron_h", "bamba", "granitemoehybrid", "falcon_h1", "zamba2", "mamba2"), _mamba2),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _delta),
}


def _hybrid(config: _Config) -> _Layers:
    """Layers of attention, of recurrent state, of both, or of neither."""
    state = _RECURRENT[config.model_type]
    found: _Layers = []
    for kind in _hybrid_kinds(config):
        if kind not in _HOLDS:
            raise config.fail(f"layers of type {kind!r} are not known")
        attends, recurs = _HOLDS[kind]
        found.append((*((config.attention(),) if attends else ()), *(state(config) if recurs else ())))
    return found


_HOLDS: Final = {
    "attention": (True, False),
    "full_attention": (True, False),
    "mamba": (False, True),
    "mamba2": (False, True),
    "linear_attention": (False, True),
    "hybrid": (True, True),
    "mlp": (False, False),
    "moe": (False, False),
}
"""Whether a layer of this type keeps K and V, and whether it keeps state."""
_PATTERN: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _hybrid_kinds(config: _Config) -> list[str]:
    """What each layer is; models say it in different ways."""
    kinds, values = config.kinds(), config.values
    if kinds is not None:
        return kinds
    if (pattern := values.get("hybrid_override_pattern")) is not None:
        if not isinstance(pattern, str):
            raise config.fail(f"hybrid_override_pattern is {pattern!r}, but must be text")
        if len(pattern) != (config.maybe("num_hidden_layers") or len(pattern)):
            raise config.fail(
                f"hybrid_override_pattern has {len(pattern)} letters, but num_hidden_layers is {config.layer_count()}"
            )
        return [_PATTERN.get(letter, letter) for letter in pattern]
    count = config.layer_count()
    if config.model_type in _ALIKE:
        return [_ALIKE[config.model_type]] * count
    attending = _attending(config, count)
    return ["attention" if layer in attending else "linear_attention" for layer in range(count)]


_ALIKE: Final = {"falcon_h1": "hybrid", "mamba": "mamba", "mamba2": "mamba"}
"""Models whose layers are all of one type."""


def _attending(config: _Config, count: int) -> Collection[int]:
    """The layers that keep K and V, where the config gives their numbers or a rule."""
    if config.model_type == "jamba":
        offset = config.number("attn_layer_offset") if config.values.get("attn_layer_offset") else 0
        return range(offset, count, config.number("attn_layer_period"))
    if config.model_type == "bamba":
        return _numbered(config, "attn_layer_indices", count)
    if interval := config.maybe("full_attention_interval"):
        return range(interval - 1, count, interval)
    raise config.fail("layer_types is missing, so it is not known which layers keep what")


def _numbered(config: _Config, key: str, count: int) -> Collection[int]:
    """Layers that are listed by their numbers; none without such a list."""
    found: object = config.values.get(key)
    numbers = cast("Sequence[object]", found if isinstance(found, list | tuple) else [] if found is None else [None])
    if any(not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < count for n in numbers):
        raise config.fail(f"{key} is {found!r}, but must be a list of numbers of the {count} layers, from 0 on")
    return cast("Collection[int]", numbers)


_PLAIN_TYPES: Final = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "gpt_oss", "phi", "phi3", "phimoe", "glm", "glm4", "glm4_moe", "nemotron",
)  # fmt: skip
_LATENT_TYPES: Final = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa",
)  # fmt: skip
_READERS: Final[Mapping[str, Callable[[_Config], _Layers]]] = {
    **dict.fromkeys(_PLAIN_TYPES, _plain),
    **dict.fromkeys(_LATENT_TYPES, _latent),
    **dict.fromkeys(_RECURRENT, _hybrid),
}
KNOWN_TYPES: Final = frozenset(_READERS)
"""Model types whose caches are known; others are plain attention or refused."""
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    # published configs leave out what is the default of the model's class in transformers
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window_pattern": 6}
}


# --- engines

_GAP: Final = 1 << 21
"""Between tensors there are at least so many bytes that belong to none."""
_POOL: Final = 1 << 16
_GOLDEN: Final = 0.6180339887


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """How an engine divides a model's cache among its ranks and lays it out.

    Rank numbers count tensor parallelism first, then context parallelism, then stages:
    `(stage * cp + context) * tp + tensor`.

    Attributes:
        tp: Ranks that share the heads. Where there are more ranks than heads, or none to share (MLA), they hold copies.
        pp: Number of stages, or the number of layers of each. An even division gives what is left over to the stages
            before the last, from the back, as vLLM does.
        cp: Ranks that share the tokens.
        cp_chunk: Consecutive tokens per turn among them.
        block: Tokens that one block id covers on a rank.
        kernel_block: Tokens in a block of the kernel, if the engine counts in larger ones; None if not.
        layout: An axis string, or a name of `LAYOUTS`. Without a kv axis K and V are tensors of their own, without a
            layer axis each layer is.
        cross_layer: Whether all layers of a block lie next to each other, K and V of a layer together.
    """

    tp: int = 1
    pp: int | Sequence[int] = 1
    cp: int = 1
    cp_chunk: int = 1
    block: int = 16
    kernel_block: int | None = None
    layout: str = "NHD"
    cross_layer: bool = False

    def __post_init__(self) -> None:
        kernel = self.block if self.kernel_block is None else self.kernel_block
        stages = [self.pp] if isinstance(self.pp, int) else list(self.pp)
        if not stages:
            raise GeometryError("pp names no stages: give their number, or the number of layers of each")
        for name, number in (
            ("tp", self.tp),
            ("cp", self.cp),
            ("cp_chunk", self.cp_chunk),
            ("block", self.block),
            ("kernel_block", kernel),
            *(("pp", stage) for stage in stages),
        ):
            _check_positive(name, number)
        ranks = self.tp * self.cp * (self.pp if isinstance(self.pp, int) else len(stages))
        if ranks > MAX_WORLD:
            raise GeometryError(f"tp, pp and cp make an engine of {ranks} ranks, but {MAX_WORLD} are the most")
        if self.block % kernel:
            raise GeometryError(f"block={self.block} is no multiple of kernel_block={self.kernel_block}")
        names = {axis.name for axis in self.axes}
        missing = [name for name in ("token", "head", "dim") if name not in names]
        if missing:
            raise GeometryError(
                f"layout={self.layout!r}: the axis {missing[0]!r} is missing; name it even if the model has none"
            )

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes of an attention cache, outermost first."""
        given = parse_axes(expand_layout(self.layout))
        if not self.cross_layer:
            return given
        # the same inside of a block, with all layers of a block next to each other and K and V of each layer together
        inside = tuple(axis for axis in given if axis.name not in {"block", "layer"})
        kv = () if any(axis.name == "kv" for axis in inside) else (Axis("kv"),)
        return (Axis("block"), Axis("layer"), *kv, *inside)

    @property
    def axis_string(self) -> str:
        """The same as text."""
        return " ".join(map(str, self.axes))

    def stages(self, layers: int) -> list[range]:
        """Layers of each stage.

        Raises:
            GeometryError: If there are more stages than layers, or the layers given for each do not add up.
        """
        if isinstance(self.pp, int):
            if self.pp > layers:
                raise GeometryError(f"pp={self.pp} is not possible: the model has {layers} layers")
            each, left = divmod(layers, self.pp)
            counts = [each] * self.pp
            for stage in range(left):
                counts[-2 - stage] += 1
        else:
            counts = list(self.pp)
            if sum(counts) != layers:
                given = "+".join(map(str, counts))
                raise GeometryError(f"pp={given} is not possible: that is {sum(counts)} layers, the model has {layers}")
        return [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]


@dataclass(frozen=True, eq=False)
class Engine:
    """The caches of all ranks of one engine."""

    model: ModelCache
    layout: EngineLayout
    dtype: str  # of K and V (and of latent rows), by torch's name
    pool: int = _POOL  # block ids in every group
    ranks: tuple[CacheGeometry, ...] = field(init=False, repr=False)  # what each holds; addresses are made up

    def __post_init__(self) -> None:
        _check_positive("blocks", self.pool)
        if self.layout.cp > 1 and any(part.window is not None for part in self.parts):
            raise GeometryError(f"cp={self.layout.cp} is not possible: the model has sliding windows")
        stages = self.layout.stages(len(self.model.layers))
        places = product(stages, range(self.layout.cp), range(self.layout.tp))
        object.__setattr__(self, "ranks", tuple(self._rank(*place) for place in places))

    @lazy
    def parts(self) -> tuple[Part, ...]:
        """Every kind of part that some layer has, in order of first mention."""
        return tuple(dict.fromkeys(part for parts in self.model.layers for part in parts))

    def spans(self, stop: int, *, aligned: int = 1, draw: int = 0) -> dict[str, Span]:
        """Block lists of a request of `stop` tokens, one for every group of the model.

        Ids are scattered over the pool, see `scattered`. The list of a group with a sliding window begins with the
        block of the first token that the next token still sees.

        Args:
            stop: Tokens of the request.
            aligned: A window's list begins at a multiple of so many tokens, besides that of a block: the other side's
                blocks, so that both lists begin at one token.
            draw: As in `scattered`; give the two sides of a transfer different ones.

        Raises:
            GeometryError: If the pool is too small.
        """
        found: dict[str, Span] = {}
        for part in self.parts:
            first, grain = 0, lcm(self.layout.block, aligned)
            if part.window is not None:
                first = max(0, stop - part.window + 1) // grain * grain
            turn, rest = divmod(stop - first, self.layout.cp * self.layout.cp_chunk)
            most = turn * self.layout.cp_chunk + min(rest, self.layout.cp_chunk)  # on the rank that has the first turn
            count = 1 if part.state else -(-most // self.layout.block)
            found[part.group] = Span(scattered(count, self.pool, draw=draw), first)
        return found

    def _rank(self, stage: range, context: int, tensor: int) -> CacheGeometry:
        memory = _Memory(self, context, tensor)
        rows: dict[Part, list[int]] = {}
        slots: dict[tuple[Part, ...], list[int]] = {}
        for layer in stage:
            for part in self.model.layers[layer]:
                if not part.state:
                    rows.setdefault(part, []).append(layer)
            if state := tuple(part for part in self.model.layers[layer] if part.state):
                slots.setdefault(state, []).append(layer)
        specs = [spec for part, layers in rows.items() for spec in memory.rows(part, layers)]
        specs += [spec for parts, layers in slots.items() for spec in memory.slots(parts, layers)]
        if not specs:
            raise GeometryError(
                f"pp={self.layout.pp}: the stage of layers {stage.start}..{stage.stop - 1} keeps no cache; divide the "
                "layers otherwise"
            )
        return CacheGeometry(tuple(specs))


class _Memory:
    """Lays out the tensors of one rank one after the other, with gaps."""

    def __init__(self, engine: Engine, context: int, tensor: int) -> None:
        self._engine: Final = engine
        self._layout: Final = engine.layout
        self._tokens: Final = Interleave(context, engine.layout.cp, engine.layout.cp_chunk)
        self._tensor: Final = tensor
        self._next = _GAP

    def rows(self, part: Part, layers: Sequence[int]) -> Iterator[TensorSpec]:
        """What is kept for each token: tensors as the layout says, without the axes that the part does not have."""
        layout, dtype = self._layout, part.dtype or self._engine.dtype
        absent = {"head"} if part.units == 0 else set[str]()
        absent |= {"kv"} if part.kv == ("",) else set()
        axes = [axis for axis in layout.axes if axis.name not in absent]
        names = {axis.name for axis in axes}
        heads = self._heads(part)
        kernel = layout.kernel_block or layout.block
        ratio = layout.block // kernel
        for held in [tuple(layers)] if "layer" in names else [(layer,) for layer in layers]:
            for kv in [part.kv] if "kv" in names else [(half,) for half in part.kv]:
                counts = {"block": self._engine.pool * ratio, "layer": len(held), "kv": len(kv), "head": len(heads)}
                counts |= {"token": kernel, "dim": part.dim}
                shape = tuple(_extent(axis, counts[axis.name]) for axis in axes)
                strides = _contiguous(shape, ITEM_BYTES[dtype])
                yield TensorSpec(
                    group=part.group,
                    part=part.name,
                    kv=kv,
                    layers=held,
                    heads=heads,
                    axes=" ".join(map(str, axes)),
                    shape=shape,
                    strides=strides,
                    dtype=dtype,
                    item_bytes=ITEM_BYTES[dtype],
                    base=self._place(shape[0] * strides[0]),
                    block_ratio=ratio,
                    tokens=self._tokens,
                )

    def slots(self, parts: Sequence[Part], layers: Sequence[int]) -> Iterator[TensorSpec]:
        """State: of each layer one page a slot, in which the parts lie behind each other; or all layers' pages."""
        places, page = self._page(parts)
        across = self._layout.cross_layer
        slot = page * (len(layers) if across else 1)
        for held in [tuple(layers)] if across else [(layer,) for layer in layers]:
            base = self._place(self._engine.pool * slot)
            for part, (offset, head, dim) in zip(parts, places, strict=True):
                heads = self._heads(part)
                inner = {"dim": (part.dim, dim), "head": (len(heads), head)}
                order = ("dim", "head") if part.dim_first else ("head", "dim")
                outer = {"block": (self._engine.pool, slot), "layer": (len(held), page)}
                axes = outer | {name: inner[name] for name in order}
                yield TensorSpec(
                    group=part.group,
                    part=part.name,
                    kv=part.kv,
                    layers=held,
                    heads=heads,
                    axes=" ".join(axes),
                    shape=tuple(count for count, _ in axes.values()),
                    strides=tuple(stride for _, stride in axes.values()),
                    dtype=part.dtype,
                    item_bytes=ITEM_BYTES[part.dtype],
                    base=base + offset,
                )

    def _page(self, parts: Sequence[Part]) -> tuple[list[tuple[int, int, int]], int]:
        """(offset, head stride, dim stride) in bytes of each part of one layer's page, and the size of the page."""
        places: list[tuple[int, int, int]] = []
        size = 0
        for _, tensor in groupby(parts, key=lambda part: part.name.split(".")[0]):
            held = [(part, len(self._heads(part)), ITEM_BYTES[part.dtype]) for part in tensor]
            row = sum(heads * item for _, heads, item in held)  # where dim is outside, all parts share its rows
            at = size
            for part, heads, item in held:
                places.append((at, item, row) if part.dim_first else (at, part.dim * item, item))
                at += heads * item
            size += sum(heads * item * part.dim for part, heads, item in held)
        return places, size

    def _heads(self, part: Part) -> range:
        """Coordinates of the head axis that this rank holds: its share of the units, or a copy of one of them."""
        tp, units = self._layout.tp, part.units
        if units == 0:
            return range(1)
        if units % tp and tp % units:
            what = "heads" if part.unit == 1 else f"groups of {part.unit} channels"
            raise GeometryError(
                f"tp={tp} is not possible: {units} {what}{f' of part {part.name!r}' if part.name else ''} can neither "
                "be divided evenly among the ranks nor copied evenly"
            )
        each, first = (units // tp, self._tensor * (units // tp)) if units >= tp else (1, self._tensor * units // tp)
        return range(first * part.unit, (first + each) * part.unit)

    def _place(self, nbytes: int) -> int:
        base = self._next
        self._next += -(-nbytes // _GAP) * _GAP + _GAP
        return base


def _check_positive(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise GeometryError(f"{name}={number} is not possible: give a whole number from 1 on")


def _extent(axis: Axis, count: int) -> int:
    """Elements along an axis, or along its part."""
    if not axis.split:
        return count
    if count % axis.split:
        raise GeometryError(f"layout: {axis} needs {axis.name} to be a multiple of {axis.split}, but it is {count}")
    return axis.split if axis.inner else count // axis.split


def _contiguous(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Byte strides of a tensor in C order."""
    return tuple(item_bytes * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def scattered(count: int, pool: int, *, draw: int = 0) -> NDArray[np.int64]:
    """Distinct block ids of which no two that follow each other are neighbours: multiples of a step, modulo the pool.

    Block lists of a busy engine rarely have runs, so a plan over one that has would promise pieces that are too large.
    Lists with different draws never have neighbours at the same places, so pieces do not merge over blocks by chance.
    (In a pool of a few blocks there is too little choice for that.)

    Raises:
        GeometryError: If the pool has fewer ids.
    """
    if count > pool:
        raise GeometryError(f"a pool of {pool} blocks cannot hold {count} blocks: give more blocks, or fewer tokens")
    begin = int(pool * _GOLDEN)
    steps = (step for step in chain(range(begin, pool - 1), range(2, begin)) if step > 1 and gcd(step, pool) == 1)
    fit = list(islice(steps, draw + 1)) or [1]  # a pool of a few blocks has nothing but neighbours
    step = fit[draw % len(fit)]
    return np.arange(count, dtype=np.int64) * step % pool


def from_hf_config(
    config: Mapping[str, Any] | str | Path,
    *,
    tp: int = 1,
    pp: int | Sequence[int] = 1,
    cp: int = 1,
    cp_chunk: int = 1,
    block: int = 16,
    kernel_block: int | None = None,
    layout: str = "NHD",
    cross_layer: bool = False,
    dtype: str | None = None,
    blocks: int = _POOL,
) -> Engine:
    """The caches of all ranks of an engine that runs a model.

    Args:
        config: A Hugging Face config as a mapping, or the path of a `config.json` or its folder.
        tp: Ranks that share the heads; more ranks than heads hold copies.
        pp: Number of stages, or the layers of each.
        cp: Ranks that share the tokens.
        cp_chunk: Consecutive tokens per turn among them.
        block: Tokens that a block id covers on a rank.
        kernel_block: Tokens in a block of the kernel, where the engine counts in larger ones.
        layout: An axis string, or a name such as `"NHD"`.
        cross_layer: Whether all layers of a block lie next to each other.
        dtype: Of K, V and latent rows: torch's name, or `bf16`, `fp16`, `fp8`. By default the model's. State keeps the
            dtype of the model.
        blocks: Block ids in every group.

    Returns:
        The engine; `.ranks` are the geometries by rank.

    Raises:
        GeometryError: If the config is not understood, or the model cannot be divided so.

    Warns:
        UserWarning: If the model type is not known and plain attention is assumed.
    """
    layouts = EngineLayout(
        tp=tp,
        pp=pp,
        cp=cp,
        cp_chunk=cp_chunk,
        block=block,
        kernel_block=kernel_block,
        layout=layout,
        cross_layer=cross_layer,
    )
    model = read_model(config)
    for note in model.notes:
        warnings.warn(note, stacklevel=2)
    return Engine(model, layouts, model.dtype if dtype is None else dtype_name(dtype), blocks)
