"""Tasksets of the package verifiers: `tasksets.py` loads their tasks and scores replies, `problems.py` makes them a task."""
