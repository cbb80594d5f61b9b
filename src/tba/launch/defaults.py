"""Settings that scale with the model and the machine, filled in before a run starts; its config.yaml shows them."""

from __future__ import annotations

from tba.config import Config, Schedule

ANCHOR_PARAMETERS, ANCHOR_RATE = 0.4e6, 2e-4
"""The shipped model's size and a rate that it learns at (benchmarks/learning_rate.py)."""
EXPONENT = 0.6
"""Fitted to rates that work: 2e-4 at 0.4M, about 3e-6 at 0.5B."""


def learning_rate_for(num_parameters: int) -> float:
    """2e-4 at 0.4M parameters, 2.8e-6 at 0.5B, 5.7e-7 at 7B; two digits."""
    return float(f"{ANCHOR_RATE * (num_parameters / ANCHOR_PARAMETERS) ** -EXPONENT:.1e}")


def with_defaults(config: Config, *, num_parameters: int, on_gpu: bool) -> Config:
    """The config with every None that means `by the model or machine` replaced."""
    train, generate = config.train, config.generate
    train = train.model_copy(
        update={
            "learning_rate": train.learning_rate or Schedule(start=learning_rate_for(num_parameters)),
            "tokens_per_micro_batch": train.tokens_per_micro_batch or (32_768 if on_gpu else 4_096),
        }
    )
    generate = generate.model_copy(update={"slots": generate.slots or (256 if on_gpu else 128)})
    return config.model_copy(update={"train": train, "generate": generate})
