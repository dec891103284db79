"""Puts this folder on the path, so that its tests can import their helper `ends`, and that of `preloaded`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
