"""Puts this folder on the path, so that its tests, and those in tests/gpu, can import what stands beside them.

Those of requests also use the worlds and the oracle of tests/geometry, and read tables as tests/integration does.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "geometry", HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
