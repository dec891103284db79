"""Puts the helpers of geometry's tests on the path: an explanation is compared with the plan of a drawn world."""

import sys
from pathlib import Path

GEOMETRY = str(Path(__file__).parents[1] / "geometry")
if GEOMETRY not in sys.path:
    sys.path.append(GEOMETRY)
