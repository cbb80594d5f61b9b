"""Training: useful tokens per second of a TB step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from gpu_bench.models import make_model
from gpu_bench.workloads import FLOPS, SHAPES, Row
from tba.config import TrainConfig
from tba.models.load import compile_layers
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.trainer.batch import Budget
from tba.trainer.optimizer import MasterAdamW
from tba.trainer.step import TrainStep
from tba.types import Batch, Totals


def ragged_batch(vocabulary: int, *, prompts: int = 16, samples: int = 8) -> Batch:
    """Prompts of 50 to 150 tokens, responses of 50 to 450: sequences of 100 to 600."""
    rng = np.random.default_rng(0)
    lengths = torch.from_numpy(rng.integers(50, 451, prompts * samples))
    N, shape = int(lengths.sum()), (prompts, samples)
    return Batch(
        prompt_ids=tuple(f"p{p}" for p in range(prompts)),
        prompt_tokens=tuple(torch.from_numpy(rng.integers(3, vocabulary, rng.integers(50, 151))) for _ in range(prompts)),
        token_ids_N=torch.from_numpy(rng.integers(3, vocabulary, N)),
        offsets=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        loss_mask_N=torch.ones(N, dtype=torch.bool),
        log_ref_N=torch.full((N,), -10.0), behaviour_N=torch.full((N,), -10.0), policy_N=torch.full((N,), -10.0),
        rewards={}, reward_PK=torch.from_numpy(rng.integers(0, 2, shape)).float(), weight_PK=torch.ones(shape),
        version_PK=torch.zeros(shape, dtype=torch.long), truncated_PK=torch.zeros(shape, dtype=torch.bool),
        rows_PK=torch.zeros(shape, dtype=torch.long), totals=Totals(prompts=prompts, responses=prompts * samples, tokens=N),
    )  # fmt: skip


def useful_tokens(batch: Batch) -> int:
    """Prompt and response of every response."""
    return int(batch.lengths.sum()) + batch.shape[1] * sum(len(tokens) for tokens in batch.prompt_tokens)


def make_step(model: PreTrainedModel, *, max_tokens: int = 32_768) -> TrainStep:
    optimizer = MasterAdamW(model.parameters(), TrainConfig())
    budget = Budget(max_tokens=max_tokens)
    return TrainStep(PolicyModel(model), TrajectoryBalance(), optimizer, budget=budget, temperature=1.0)


def step_seconds(step: TrainStep, batch: Batch) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    step(batch, beta=0.05, learning_rate=1e-6)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def train_rows(shapes: Sequence[str]) -> Iterator[Row]:
    for key in shapes:
        name = SHAPES[key].name
        for compiled in (False, True):
            model = make_model(SHAPES[key])
            batch = ragged_batch(model.config.vocab_size)
            step = make_step(model)
            if compiled:
                compile_layers(model)
            first = step_seconds(step, batch)
            seconds = float(np.median([step_seconds(step, batch) for _ in range(6)]))
            rate = useful_tokens(batch) / seconds
            mfu = 6 * sum(parameter.numel() for parameter in model.parameters()) * rate / FLOPS
            yield Row(
                work=f"TB training {name}, 128 sequences of 100 to 600 tokens, {'compiled' if compiled else 'eager'}",
                figure=f"{rate:,.0f} useful tok/s ({seconds * 1e3:.0f} ms a step, the first {first:.0f} s)",
                limit=f"{mfu:.0%} of {FLOPS / 1e12:.0f} TFLOP/s by 6 x parameters",
            )
            del model, step
            torch.cuda.empty_cache()
