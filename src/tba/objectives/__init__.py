"""Objectives: losses as pure functions of a batch and the model's outputs, and the registry of their names."""
