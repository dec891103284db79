"""Puts the folder of the documentation on the path: what makes its pages lies there, and is no package."""

import sys
from pathlib import Path

DOCS = str(Path(__file__).parents[2] / "docs")
if DOCS not in sys.path:
    sys.path.append(DOCS)
HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)
