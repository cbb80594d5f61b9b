"""Faults for a run, by a plan, and the account of what became of it; `benchmarks/chaos.py` is the front."""
