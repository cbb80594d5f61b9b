"""The target of trajectory balance at a step: schedules are applied here, so stored data never holds them."""

from __future__ import annotations

from dataclasses import replace

from tba.config import Config
from tba.types import Batch


def shape_target(batch: Batch, config: Config, step: int) -> tuple[Batch, float]:
    """The batch and the beta whose target log pi_ref + r / beta is (w log pi_ref + r / beta) / tau of this step."""
    weight, temperature = config.reference_weight_at(step), config.target_temperature_at(step)
    beta = config.beta_at(step) * temperature
    if weight == temperature:
        return batch, beta
    return replace(batch, log_ref_N=batch.log_ref_N * (weight / temperature)), beta
