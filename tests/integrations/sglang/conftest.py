"""Puts this folder on the path of tests and of the processes that they start, and those of vLLM's recorder and of
`preloaded`.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "vllm", HERE.parents[1] / "integration"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
