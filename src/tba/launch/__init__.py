"""Start a run: `train(config)` and `evaluate_model(target, overrides)`."""

from tba.launch.start import evaluate_model, train

__all__ = ["evaluate_model", "train"]
