"""A grid of training runs that can be resumed, and the table of its results: `tba compare STUDY.yaml`."""

from tba.run.compare.runs import compare

__all__ = ["compare"]
