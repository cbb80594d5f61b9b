"""A grid of training runs, resumable, then one table: `tba compare STUDY.yaml`."""

from tba.compare.runner import compare, list_runs

__all__ = ["compare", "list_runs"]
