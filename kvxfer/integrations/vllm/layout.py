"""Where an attention backend puts K and V: it is made to write some that are known, and these are looked for.

Each element that it writes is a number of its own, digit by digit in whole numbers that the cache's dtype has exactly.
They go into the first two blocks and the last before vLLM computes anything; what was there is put back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheTensor
from kvxfer.integrations.vllm.caches import backend_name

__all__ = ["Probe"]

_AXES: Final = ("kv", "block", "head", "token", "dim")


class Probe:
    """What the backend of one layer writes into its cache.

    Args:
        name: vLLM's of the layer.
        layer: vLLM's attention layer, once its backend is set up and its cache is bound.
        cache: The view that vLLM registers: block, head, token and content.
        sizes: Elements that a token has in a head: of `"k"` and `"v"`, or of `""` in latent attention.
    """

    def __init__(self, name: str, layer: Any, cache: torch.Tensor, sizes: Mapping[str, int]) -> None:
        self._name, self._layer, self._cache = name, layer, cache
        blocks, heads, tokens, _ = cache.shape
        self._blocks: Final = sorted({0, min(1, blocks - 1), blocks - 1})
        self._count = 0
        self._numbers: Final[dict[str, torch.Tensor]] = {}
        for half, size in sizes.items():
            shape = (len(self._blocks), heads, tokens, size)
            numbers = torch.arange(self._count, self._count + torch.Size(shape).numel(), device=cache.device)
            self._numbers[half] = numbers.view(shape)
            self._count += numbers.numel()

    @property
    def backend(self) -> str:
        """Its name, where there is a layer that says it."""
        backend: Any = self._layer and self._layer.get_attn_backend()
        return backend_name(backend) if backend else "that has no name"

    def shows(self, tensors: Sequence[CacheTensor]) -> bool:
        """Whether every element is where these descriptions have it.

        Raises:
            GeometryError: If the backend gives no way to write, or fails.
        """
        held = [one for tensor in tensors for one in _halves(tensor)]
        seen = self._read([view for _, view in held])
        return [half for half, _ in held] == list(self._numbers) and all(
            numbers.flatten(3).equal(expected) for numbers, expected in zip(seen, self._numbers.values(), strict=True)
        )

    def found(self) -> list[tuple[str, torch.Tensor, str]]:
        """K and V where they were written: half, view, and the names of its axes.

        Raises:
            GeometryError: If no axes say that, with what was seen.
        """
        (seen,) = self._read([self._cache])
        indices = [torch.tensor(self._blocks), *map(torch.arange, self._cache.shape[1:])]
        places = _offsets(indices, self._cache.stride()) + int(self._cache.storage_offset())
        written = seen.cpu() >= 0
        at = torch.full((self._count,), -1)
        at[seen.cpu()[written]] = places[written]
        labels = {"k": "K", "v": "V", "": "what a token has"}
        fitted = [(half, *self._fit(labels[half], at[numbers.cpu()])) for half, numbers in self._numbers.items()]
        if int(written.sum()) > self._count:
            raise self.refusal("some elements are in two places")
        return fitted

    def refusal(self, seen: str) -> GeometryError:
        """What to raise when known K and V are not where any description has them."""
        cache = self._cache
        return GeometryError(
            f"attention backend {self.backend} wrote known K and V into the cache of {self._name} ({cache.dtype}, "
            f"shape {tuple(cache.shape)}, strides {cache.stride()}), and {seen}: run vLLM with another --dtype (AMX "
            "stores tiles of bfloat16) or another --attention-backend"
        )

    # --- inside

    def _read(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The number of the element at each place of the blocks in these views, once all are written; -1 for none."""
        write, blocks = self._writer(), self._blocks
        bound: Any = getattr(self._layer, "kv_cache", None)
        if not isinstance(bound, torch.Tensor) or bound.shape[:1] != self._cache.shape[:1]:
            raise GeometryError(
                f"{self._name} is bound to no cache whose first axis is the {self._cache.shape[0]} blocks of its view, "
                f"so where attention backend {self.backend} has K and V is not known: {_ADVICE}"
            )
        base, place = int(2 / torch.finfo(self._cache.dtype).eps), 1  # up to there whole numbers are exact
        with torch.inference_mode():  # as vLLM has it
            found = [torch.zeros_like(view[blocks], dtype=torch.int64) for view in views]
            kept = bound[blocks]
            try:
                while place < self._count:
                    bound[blocks] = 0
                    digits = {half: numbers // place % base + 1 for half, numbers in self._numbers.items()}
                    write({half: digit.transpose(1, 2).flatten(0, 1) for half, digit in digits.items()})
                    for numbers, view in zip(found, views, strict=True):
                        digit = view[blocks].double()
                        known = (numbers >= 0) & (digit >= 1) & (digit <= base) & (digit == digit.floor())
                        numbers.copy_(torch.where(known, numbers + (digit.nan_to_num() - 1).long() * place, -1))
                    place *= base
            except Exception as error:
                raise GeometryError(
                    f"attention backend {self.backend} cannot write into the cache of {self._name}, so where it has K "
                    f"and V is not known ({error!r}): {_ADVICE}"
                ) from error
            finally:
                bound[blocks] = kept
        return found

    def _writer(self) -> Callable[[dict[str, torch.Tensor]], None]:
        """What has the backend write rows by token, head and dim, as vLLM has it before a forward pass."""
        layer, cache = self._layer, self._cache
        update: Any = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
        latent = "" in self._numbers  # where vLLM does not ask for what follows
        if update is None or (not latent and layer.get_attn_backend().forward_includes_kv_cache_update):
            raise GeometryError(
                f"attention backend {self.backend} gives no way to write into the cache of {self._name}, so where it "
                f"has K and V is not known: {_ADVICE}"
            )
        tokens = torch.arange(cache.shape[2], device=cache.device)
        slots = torch.cat([block * cache.shape[2] + tokens for block in self._blocks])

        def write(rows: dict[str, torch.Tensor]) -> None:
            rows = {half: those.to(cache.dtype) for half, those in rows.items()}
            if latent:
                first, rest = (part.contiguous() for part in rows[""].tensor_split([layer.kv_lora_rank], dim=-1))
                scale = layer._k_scale  # noqa: SLF001 - so it is called there
                update(first[:, 0], rest, layer.kv_cache, slots, layer.kv_cache_dtype, scale)
            else:
                update(layer, rows["k"], rows["v"], layer.kv_cache, slots)

        return write

    def _fit(self, label: str, at: torch.Tensor) -> tuple[torch.Tensor, str]:
        """The view whose elements lie at these places, and its axes, the largest stride first."""
        lost = at < 0
        if lost.any():
            raise self.refusal(f"{int(lost.sum())} of {at.numel()} elements of {label} are nowhere, as {_first(lost)}")
        first = int(at[0, 0, 0, 0])
        block, head, token, step = (int(at.select(axis, 1 % at.shape[axis]).flatten()[0]) - first for axis in range(4))
        line = [int(place) - first for place in at[0, 0, 0]]
        size = len(line)
        inner = next((dim for dim in range(size) if line[dim] != dim * step), size)
        _, heads, tokens, _ = at.shape
        axes = [("block", self._cache.shape[0], block), ("head", heads, head), ("token", tokens, token)]
        if inner < size and size % inner == 0:
            axes += [(f"dim/{inner}", size // inner, line[inner]), (f"dim%{inner}", inner, step)]
        else:
            axes.append(("dim", size, step))
        indices = [torch.tensor(self._blocks), *(torch.arange(count) for _, count, _ in axes[1:])]
        regular = first + _offsets(indices, [stride for _, _, stride in axes]).flatten(3)
        odd = at != regular if not at.equal(regular) else at < first
        if odd.any():
            have, want = (int(places[odd][0]) - first for places in (at, regular))
            raise self.refusal(
                f"no axes say where {label} lies: {_first(odd)} is {have} elements after the first, where {want} is due"
            )
        if "" in self._numbers:
            del axes[1]
        axes.sort(key=lambda axis: -axis[2])
        names, shape, strides = zip(*axes, strict=True)
        return self._cache.as_strided(shape, strides, first), " ".join(names)


_ADVICE: Final = (
    'run vLLM with another --attention-backend, or with "trust_layout": true in kv_connector_extra_config, and tokens '
    "are wrong if it stores otherwise than its view says"
)


def _halves(tensor: CacheTensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What a description says of its memory: half, and a view of block, head, token and dim, which may be two axes."""
    spec, memory = tensor.spec(), tensor.tensor
    strides = [stride // spec.item_bytes for stride in spec.strides]
    names = spec.axes.replace("%", "/~").split()  # the inner part behind the outer
    order = sorted(range(len(names)), key=lambda at: (_AXES.index(names[at].split("/")[0]), "~" in names[at]))
    view = memory.as_strided(spec.shape, strides, memory.storage_offset()).permute(order)
    view = view if "kv" in names else view.unsqueeze(0)
    return zip(spec.kv, view if "head" in names else view.unsqueeze(2), strict=True)


def _offsets(indices: Sequence[torch.Tensor], strides: Sequence[int]) -> torch.Tensor:
    """How far, in elements, every combination of indices is from all zeros."""
    found = torch.zeros((), dtype=torch.int64)
    for index, stride in zip(indices, strides, strict=True):
        found = found.unsqueeze(-1) + index * stride
    return found


def _first(odd: torch.Tensor) -> str:
    """The first of these elements in words."""
    return ", ".join(f"{name} {at}" for name, at in zip(_AXES[1:], map(int, odd.nonzero()[0]), strict=True))
