"""A torch tensor with the names of its axes: where memory enters. From here on only its `TensorSpec` is used."""

import operator
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from kvxfer.errors import GeometryError
from kvxfer.geometry.axes import parse_axes
from kvxfer.geometry.layouts import bind_layout
from kvxfer.geometry.scales import read_scale
from kvxfer.geometry.spec import EVERY_TOKEN, Interleave, TensorSpec, check_whole

if TYPE_CHECKING:
    import torch

__all__ = ["CacheTensor"]


@dataclass(frozen=True, slots=True, eq=False)
class CacheTensor:
    """A torch tensor with the names of its axes and the global coordinates that it holds.

    The tensor may be any strided view. It must stay allocated while a worker has it registered; kvxfer keeps a
    reference.

    Tensors of one group must not share a byte, since a block id means a block of each of them. Tensors of different
    groups may lie in the same memory (a hybrid pool). Nothing compares their ids, so the caller's allocator must not
    use the same bytes for two groups at a time, nor bytes that `MemoryInDoubt` names in one group for another.

    Args:
        tensor: CPU or CUDA tensor, one dimension per name in `axes`.
        axes: Names of its axes in its own order: block, layer, kv, head, token, dim; head and dim may be split once.
            Or one of vLLM's names for such an order, as in `LAYOUTS`: `"NHD"`, `"LBNHC"`.
        layers: Global numbers of the layers that it holds, in the order of its layer axis.
        heads: Global range of the heads that it holds; may be left out without a head axis.
        kv: For a tensor without a kv axis `"k"` or `"v"`, or None if it holds neither (MLA); with one, `"kv"` (the
            default) or `"vk"` say its order.
        group: Block-address space.
        part: Tells tensors of one layer with different meaning apart.
        tokens: Which tokens it holds, under context parallelism.
        kernel_blocks_per_id: Blocks of this tensor that one block id stands for.
        tokens_per_row: Tokens that one index of the token axis stands for.
        scale: What a stored number must be multiplied by to give its value: float32 of shape () or (heads,), one number
            for each head that this tensor holds; 1 without it. It is read here, once, which waits for the device that
            holds it; kvxfer keeps no reference, and later changes of the tensor are not seen. Both sides may have one.
            Where they differ, as where dtypes do, a decode rank with `convert=True` gets
            `stored * scale of the source / scale of the destination`, and any other is refused.
    """

    tensor: "torch.Tensor"
    axes: str
    _: KW_ONLY
    layers: Sequence[int]
    heads: range | None = None
    kv: str | None = None
    group: str = "default"
    part: str = ""
    tokens: Interleave = EVERY_TOKEN
    kernel_blocks_per_id: int = 1
    tokens_per_row: int = 1
    scale: "torch.Tensor | None" = None

    def _check_types(self) -> None:
        """Callers may be untyped: say what was passed instead of failing somewhere inside."""
        wanted = (
            ("tensor must be a torch.Tensor", self.tensor, "data_ptr"),
            ("axes must be text", self.axes, "split"),
            ("heads must be a range", self.heads or range(1), "step"),
            ("tokens must be an Interleave", self.tokens, "chunk"),
            ("group must be text", self.group, "encode"),
            ("part must be text", self.part, "encode"),
            ("kv must be text", self.kv or "", "encode"),
        )
        for rule, value, mark in wanted:
            if not hasattr(value, mark):
                raise GeometryError(f"{rule}, not {type(value).__name__}")
        check_whole("kernel_blocks_per_id", self.kernel_blocks_per_id)
        check_whole("tokens_per_row", self.tokens_per_row)
        try:
            for layer in self.layers:
                operator.index(layer)
        except TypeError as error:
            raise GeometryError(f"layers must be a list of whole numbers, not {self.layers!r}") from error

    def spec(self, null_block: int | None = None) -> TensorSpec:
        """The description without the memory.

        Raises:
            GeometryError: If names, coordinates, shape, strides or device do not fit together, or if the tensor reaches
                beyond its storage.
        """
        self._check_types()
        tensor = self.tensor
        if kind := _not_plain(tensor):
            raise GeometryError(f"a cache tensor of group {self.group!r} is {kind}")
        axes, shape, strides = bind_layout(self.axes, tensor.shape, tensor.stride())
        names = {axis.name for axis in parse_axes(axes)}
        if self.heads is None and "head" in names:
            raise GeometryError(
                f"a cache tensor of group {self.group!r} has a head axis, so heads= must name its range"
            )
        item_bytes = tensor.element_size()
        heads = self.heads if self.heads is not None else range(1)
        found = TensorSpec(
            group=self.group,
            part=self.part,
            kv=tuple(self.kv or ("kv" if "kv" in names else "")) or ("",),
            layers=tuple(int(layer) for layer in self.layers),
            heads=heads,
            axes=axes,
            shape=shape,
            strides=tuple(stride * item_bytes for stride in strides),
            dtype=str(tensor.dtype).removeprefix("torch."),
            item_bytes=item_bytes,
            base=tensor.data_ptr(),
            kind=tensor.device.type,
            device=tensor.device.index or 0,
            block_ratio=int(self.kernel_blocks_per_id),
            tokens_per_row=int(self.tokens_per_row),
            tokens=self.tokens,
            null_block=null_block,
            scale=read_scale(self.scale, heads.stop - heads.start),
        )
        held = tensor.untyped_storage().nbytes()
        reach = tensor.storage_offset() * item_bytes + found.extent_bytes
        if reach > held:
            raise GeometryError(
                f"{found.name}: its last element ends at byte {reach} of its storage, which has {held}: the storage "
                "was resized or freed; register what is allocated"
            )
        return found


def _not_plain(tensor: "torch.Tensor") -> str:
    """Why the bytes of a tensor are not its values, and what to pass instead; empty for one that is plain memory."""
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        kind = "nested" if tensor.is_nested else tensor.layout
        return f"{kind}; only strided tensors are supported"
    if tensor.is_conj() or tensor.is_neg():
        lazy = "conjugated" if tensor.is_conj() else "negated"
        return f"lazily {lazy}: its memory holds other values; pass the tensor that it was made of"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype}); pass its int_repr() and its scales as tensors of their own"
    return ""
