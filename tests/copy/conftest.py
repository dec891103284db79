"""Puts this folder on the path, so that its tests, and those in tests/gpu, can import what stands beside them."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)
