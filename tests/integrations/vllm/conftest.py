"""Puts this folder on the path, so that its tests and the processes that they start can import their helpers."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)
