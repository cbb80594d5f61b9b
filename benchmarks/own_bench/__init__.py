"""Problems as users bring them, each with a start model made on the spot; `benchmarks/own_problems.py` is the front."""
