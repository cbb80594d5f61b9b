"""Problems as users bring them, each with a start model made on the spot; `benchmarks/own_problems.py` is the front."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # recipes/, where start models are trained
