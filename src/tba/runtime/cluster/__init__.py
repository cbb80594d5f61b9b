"""Roles on the nodes of a Ray cluster, under the same supervisor as those of one machine (docs/scaling.md)."""
