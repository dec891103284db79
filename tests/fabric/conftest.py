"""Puts this folder on the path, so that its tests can import their helper `ends`."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)
