"""A grid of training runs, resumable, then one table: `tba compare STUDY.yaml`."""

from tba.run.compare.runs import compare

__all__ = ["compare"]
