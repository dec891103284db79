"""Compile variants of the kernel for sm_90, which needs no GPU, and look at their accesses. Run by `test_kernel.py`."""

import os
import sys
import warnings

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile  # noqa: A004

from kvxfer.copy.kernel import OPTIONS, SUM_OPTIONS, check_exact, constants, copy_boxes, sum_items
from kvxfer.copy.tables import SumVariant, Variant
from kvxfer.geometry.copyplan import Elements

MORE = os.environ.get("KERNEL") == "all"
SIGNATURE = (
    {"table": "*i64", "first": "i32", "headers": "i32"}
    | dict.fromkeys(("gate", "generation", "closed"), "i64")
    | dict.fromkeys(("WIDTH", "TILE", "SRC", "DST"), "constexpr")
)
EXPECTED = {  # accesses a thread, of both kinds
    Variant(16): (4, "ld.global.v2.b64", "st.global.v2.b64"),
    Variant(4): (4, "ld.global.b32", "st.global.b32"),
    Variant(8, Elements(2, 1, "bfloat16", "float8_e4m3fn")): (2, "ld.global.v4.b32", "st.global.v2.b32"),
    Variant(8, Elements(1, 2, "float8_e4m3fn", "bfloat16")): (2, "ld.global.v2.b32", "st.global.v4.b32"),
    Variant(8, Elements(2, 2, "float16", "bfloat16")): (2, "ld.global.v4.b32", "st.global.v4.b32"),
}
SUM_SIGNATURE = {"table": "*i64"} | dict.fromkeys(("first", "headers", "at"), "i32")
SUMS = {  # kinds of loads of what is added up
    SumVariant(8, 32): "ld.global.b64",
    SumVariant(8, 512): "ld.global.b64",
    SumVariant(4, 512): "ld.global.b32",
    SumVariant(2, 32): "ld.global.b16",
    SumVariant(1, 512): "ld.global.b8",
    SumVariant(1, 32, Elements(2, 1, "bfloat16", "float8_e4m3fn")): "ld.global.b16",
    SumVariant(4, 512, Elements(1, 4, "float8_e5m2", "float32")): "ld.global.b8",
}
KINDS = ("b64", "b32", "b16", "b8", "v2.b64", "v2.b32", "v4.b32")


def sums() -> int:
    """How many variants of the sums are not as expected."""
    wrong = 0
    for variant, load in list(SUMS.items())[:: 1 if MORE else 2]:
        fixed = constants(variant)
        signature = SUM_SIGNATURE | dict.fromkeys(fixed, "constexpr")
        source = ASTSource(sum_items, signature=signature, constexprs=fixed)
        ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=SUM_OPTIONS).asm["ptx"]
        loads, adds = ptx.count(f"{load} "), ptx.count("red.global.gpu.relaxed.add.u64")
        stores, flushed = ptx.count("st.global"), ptx.count(".ftz")
        print(f"{variant}: {loads} x {load}, {adds} sums, {stores} stores, {flushed} x .ftz")
        wrong += loads < 4 or adds != 2 or bool(stores or flushed)
    return wrong


def main() -> int:
    warnings.simplefilter("ignore")
    wrong = sums()
    for variant, (each, load, store) in list(EXPECTED.items())[: None if MORE else 3]:
        source = ASTSource(copy_boxes, signature=SIGNATURE, constexprs=constants(variant))
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
        ptx = compiled.asm["ptx"]
        loads, stores = ptx.count(load), ptx.count(store)
        narrow = sum(ptx.count(f"st.global.{kind} ") for kind in KINDS) - stores
        check_exact(ptx)  # what a GPU is given is looked at likewise
        flushed = ptx.count(".ftz")  # subnormal numbers count
        gate = [ptx.count(f".global.sys.{order}.add.u64") for order in ("acquire", "release")]
        shared, barriers = compiled.metadata.shared, ptx.count("bar.sync")
        print(f"{variant}: {loads} x {load}, {stores} x {store}, {narrow} other stores, {flushed} x .ftz, gate {gate}, "
              f"{shared} bytes of shared memory, {barriers} barriers")  # fmt: skip
        # the gate: one block counts itself in and out, tells all its threads what it saw, and has one store of its own
        wrong += stores != each or loads != each or narrow != 1 or flushed or gate != [1, 1] or shared != 8
    print("wrong" if wrong else "all variants as expected")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
