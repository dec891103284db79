"""The Triton kernel without a GPU: in Triton's interpreter, and as PTX.

Triton decides when it is imported whether kernels are interpreted, for the whole process. So neither choice is made in
the process that runs the other tests: `kernel_cases.py` and `sum_cases.py` run in children with TRITON_INTERPRET=1 and
`kernel_ptx.py` in one without; none of these names matches `test_*.py`, so nothing else collects them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def child(*arguments, cwd=ROOT, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**environment, **variables}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("cases", ["kernel_cases.py", "sum_cases.py"])
def test_the_kernel_in_the_interpreter(cases):
    pytest.importorskip("triton", reason="triton is not installed")
    out = child("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / cases), TRITON_INTERPRET="1")
    print(out)
    assert " passed" in out
    assert "skipped" not in out


def test_the_wide_variant_makes_16_byte_accesses(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    out = child(str(HERE / "kernel_ptx.py"), TRITON_CACHE_DIR=str(tmp_path))
    print(out)
    assert "all variants as expected" in out


def test_importing_the_package_imports_neither_torch_nor_triton():
    nothing = "import sys, kvxfer.copy.mover, kvxfer.copy.walk; assert not {'torch', 'triton'} & set(sys.modules)"
    loaded = "'triton' in sys.modules"  # torch may import it by itself
    child("-c", f"{nothing}; import torch; before = {loaded}; import kvxfer.copy.cuda; assert before == ({loaded})")
