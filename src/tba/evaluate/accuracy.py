"""Accuracy, pass@k and avg@k from solved counts."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from tba.observe.metrics import mean_metrics


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is solved (unbiased, arXiv 2107.03374)."""
    if num_samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, got {num_samples}.")
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def sampled_metrics(solved: Sequence[Sequence[bool]], k: int) -> dict[str, float]:
    """pass@k and avg@k over prompts; solved[p] has the k samples of prompt p. Their standard errors are over prompts too:
    the samples of a prompt are solved or not together, and counting each would make the error look smaller than it is."""
    return mean_metrics(
        {
            f"pass@{k}": [pass_at_k(len(samples), sum(samples), k) for samples in solved],
            f"avg@{k}": [sum(samples) / max(1, len(samples)) for samples in solved],
        }
    )
