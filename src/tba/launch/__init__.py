"""Start a run: `train(config)` and `evaluate_model(target, overrides)`."""

from tba.launch.start import evaluate_model, merge_adapter, train

__all__ = ["evaluate_model", "merge_adapter", "train"]
