"""Puts this folder on the path, and the folders whose helpers these tests use: `oracle`, `agree`, `far`, `stage`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "geometry", HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
