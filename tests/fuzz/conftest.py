"""Puts this folder on the path, and the one whose helper `stage` these tests use."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "integration"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
