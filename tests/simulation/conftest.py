"""Puts this folder, and those whose helpers it uses, on the path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE.parent / "integration", HERE.parent / "protocol", HERE):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
