"""Accuracy, pass@k and avg@k from solved counts."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is solved (unbiased, arXiv 2107.03374)."""
    if num_samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, got {num_samples}.")
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def sampled_metrics(solved: Sequence[Sequence[bool]], k: int) -> dict[str, float]:
    """pass@k and avg@k over prompts; solved[p] has the k samples of prompt p."""
    num_prompts = max(1, len(solved))
    return {
        f"pass@{k}": sum(pass_at_k(len(samples), sum(samples), k) for samples in solved) / num_prompts,
        f"avg@{k}": sum(sum(samples) / max(1, len(samples)) for samples in solved) / num_prompts,
    }
