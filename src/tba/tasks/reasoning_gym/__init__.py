"""Tasks of the package reasoning-gym: `generators.py` draws problems and scores answers, `problems.py` makes them a task."""
