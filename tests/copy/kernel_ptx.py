"""Compile variants of the kernel for sm_90, which needs no GPU, and look at their accesses. Run by `test_kernel.py`."""

import sys
import warnings

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile  # noqa: A004

from kvxfer.copy.kernel import OPTIONS, constants, copy_boxes

SIGNATURE = {"table": "*i64", "first": "i32", "headers": "i32", "WIDTH": "constexpr", "TILE": "constexpr"}
PER_THREAD = 4
EXPECTED = {16: ("ld.global.v2.b64", "st.global.v2.b64"), 4: ("ld.global.b32", "st.global.b32")}


def main() -> int:
    warnings.simplefilter("ignore")
    wrong = 0
    for width, (load, store) in EXPECTED.items():
        source = ASTSource(copy_boxes, signature=SIGNATURE, constexprs=constants(width))
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS)
        ptx = compiled.asm["ptx"]
        loads, stores = ptx.count(load), ptx.count(store)
        narrow = sum(ptx.count(f"st.global.{kind}") for kind in ("b64", "b32", "b16", "b8", "v2.b64")) - stores
        print(f"{width:2d} bytes: {loads} x {load}, {stores} x {store}, {narrow} other stores, "
              f"{compiled.metadata.shared} bytes of shared memory, {ptx.count('bar.sync')} barriers")  # fmt: skip
        wrong += stores != PER_THREAD or loads != PER_THREAD or narrow or compiled.metadata.shared
    print("wrong" if wrong else "all variants as expected")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
