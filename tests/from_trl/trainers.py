"""A small training of a script, as the tests of TBATrainer's attributes and callbacks start it."""

from collections.abc import Callable
from typing import Any

from tba import TBAConfig, TBATrainer

ROWS = [{"prompt": f"w{i} w5"} for i in range(3, 33)]


def make_trainer(
    folder, output, reward: Callable[..., Any], callbacks=(), rows=ROWS, model=None, **given: Any
) -> TBATrainer:
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "disable_tqdm": True,
        "mode": "sync",
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    args = TBAConfig(output_dir=output, **(settings | given))
    return TBATrainer(model or str(folder / "model"), reward, args, rows, callbacks=list(callbacks))
