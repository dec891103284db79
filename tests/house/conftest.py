"""Puts this folder on the path: what counts the house reads imports as the test of layers does."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)
