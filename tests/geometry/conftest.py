"""Puts this folder on the path, so that its tests can import their helpers (`oracle`, `worlds`).

pytest runs with `--import-mode=importlib` and tests are no packages, so a helper module needs a place to be found in.
"""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)
