"""A run from its config to its summary. It starts with `train(config)` or `evaluate_model(target, overrides)`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.run.start import evaluate, evaluate_model, generate, merge_adapter, train

__all__ = ["evaluate", "evaluate_model", "generate", "merge_adapter", "train"]


def __getattr__(name: str) -> Any:
    """Import the entry points when they are asked for: what checks a config before a run (checks.py) needs no torch."""
    if name in __all__:
        from tba.run import start

        return getattr(start, name)
    raise AttributeError(f"module 'tba.run' has no attribute {name!r}")
