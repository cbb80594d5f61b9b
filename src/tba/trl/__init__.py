"""TBAConfig and TBATrainer: the Python entry points, with TRL's names.

from tba import TBAConfig, TBATrainer

def score(completions, answer, **columns):
    return [float(text.strip() == want) for text, want in zip(completions, answer)]

trainer = TBATrainer(
    model="path/or/hub-name",
    reward_funcs=score,
    args=TBAConfig(max_steps=200, num_generations=8),
    train_dataset=[{"prompt": "2+2=", "answer": "4"}, ...],
)
trainer.train()

`GRPOConfig` and `GRPOTrainer` are the same two under TRL's names: a script changes its import and nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba.trl.config import TBAConfig
    from tba.trl.trainer import TBATrainer

__all__ = ["TBAConfig", "TBATrainer"]


def __getattr__(name: str) -> Any:
    """Import the two when they are asked for: the command line looks up TRL's names (config/trl_names.py) without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'tba.trl' has no attribute {name!r}")
    return getattr(import_module("tba.trl.config" if name == "TBAConfig" else "tba.trl.trainer"), name)
