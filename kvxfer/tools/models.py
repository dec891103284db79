"""What a model keeps in its cache, layer by layer, read from its Hugging Face config.

Only the JSON is read; transformers is not needed. What is not known is refused by name. A model type that is not listed
here passes for plain attention, with a note that says so, if nothing in its config speaks against it.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from kvxfer.errors import GeometryError
from kvxfer.limits import MAX_LAYERS, MAX_TOKENS, MAX_WIDTH

__all__ = ["ITEM_BYTES", "KNOWN_TYPES", "ModelCache", "Part", "dtype_name", "read_model"]

ITEM_BYTES: Final[Mapping[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by torch's name of the dtype."""

_SHORT: Final = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
_DEFAULT_DTYPE: Final = "bfloat16"
_INDEX_BLOCK: Final = 128  # the indexer of DeepSeek V3.2 stores a float32 scale for so many 8-bit values


@dataclass(frozen=True, slots=True)
class Part:
    """What one layer keeps for each token, or, as state, for each request.

    Attributes:
        group: Block-address space, as in `CacheTensor`.
        name: The `part` of its cache tensors. State parts whose names agree up to the first dot lie side by side in the
            rows of one tensor (`conv.x`, `conv.B`, `conv.C`).
        kv: `("k", "v")`, or `("",)` where there are no two halves.
        units: What tensor parallelism divides: heads, or groups of channels; 0 if every rank keeps all of it.
        unit: Coordinates of the head axis in each of them: 1 for heads.
        dim: Elements of each coordinate.
        dtype: torch's name; empty for the dtype of the cache.
        window: Only so many last tokens are kept; None if all are.
        state: Whether it is state: one slot a request, no tokens.
        dim_first: State whose dim axis is outside of its head axis.
    """

    group: str
    name: str
    kv: tuple[str, ...]
    units: int
    dim: int
    unit: int = 1
    dtype: str = ""
    window: int | None = None
    state: bool = False
    dim_first: bool = False


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The cache of a model, before it is divided among ranks.

    Attributes:
        model_type: As in the config.
        dtype: The model's, by torch's name.
        layers: The parts of each layer, in order; empty for a layer without a cache.
        notes: What was assumed, in words.
    """

    model_type: str
    dtype: str
    layers: tuple[tuple[Part, ...], ...]
    notes: tuple[str, ...] = ()


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
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window_pattern": 6,
    },
}
