"""Puts this folder, and that of the recorder for vLLM, on the path of tests and of the processes that they start."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "vllm"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
