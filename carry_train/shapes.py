"""Models of real shapes with random weights and a ragged batch: what measure.py needs, whatever benchmarks/gpu.py is like."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tba.config import TrainConfig
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.train.batch import Budget
from tba.train.optimizer import MasterAdamW
from tba.train.step import TrainStep
from tba.types import Batch, Totals


def device() -> torch.device:
    return torch.device("cuda")


def qwen(layers: int = 24) -> Any:
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return _make(Qwen2ForCausalLM, config)


def llama(layers: int = 22) -> Any:
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    return _make(LlamaForCausalLM, config)


def _make(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    with device():
        return kind(config).to(torch.bfloat16).eval()


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


def make_step(model: Any, *, share: bool, max_tokens: int = 32_768) -> TrainStep:
    optimizer = MasterAdamW(model.parameters(), TrainConfig())
    budget = Budget(max_tokens=max_tokens, share_prompts=share)
    return TrainStep(PolicyModel(model), TrajectoryBalance(), optimizer, budget=budget, temperature=1.0)


def step_seconds(step: TrainStep, batch: Batch) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    step(batch, beta=0.05, learning_rate=1e-6)
    torch.cuda.synchronize()
    return time.perf_counter() - started
