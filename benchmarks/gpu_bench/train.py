"""Training: useful tokens per second of a TB step, whether its gradients are right, and the scores of a reference."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from gpu_bench.models import make_model
from gpu_bench.workloads import FLOPS, SHAPES, Row
from tba.config import LoraConfig, TrainConfig
from tba.generate.scoring import ReferenceScorer
from tba.models.load import add_lora, compile_layers
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.train.batch import Budget
from tba.train.optimizer import MasterAdamW
from tba.train.step import TrainStep
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


def make_step(model: PreTrainedModel, *, share: bool, max_tokens: int = 32_768, offload: bool = False) -> TrainStep:
    optimizer = MasterAdamW(model.parameters(), TrainConfig(offload_optimizer=offload))
    budget = Budget(max_tokens=max_tokens, share_prompts=share)
    return TrainStep(PolicyModel(model), TrajectoryBalance(), optimizer, budget=budget, temperature=1.0)


def step_seconds(step: TrainStep, batch: Batch) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    step(batch, beta=0.05, learning_rate=1e-6)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def train_rows(shapes: Sequence[str]) -> Iterator[Row]:
    must = {"0.5B": "175k, stretch 200k", "1.1B": "100k, stretch 105k"}
    for key in shapes:
        name = SHAPES[key].name
        for compiled, share in ((False, True), (True, True), (True, False)):
            model = make_model(SHAPES[key])
            batch = ragged_batch(model.config.vocab_size)
            step = make_step(model, share=share)
            if compiled:
                compile_layers(model)
            first = step_seconds(step, batch)
            seconds = float(np.median([step_seconds(step, batch) for _ in range(6)]))
            rate = useful_tokens(batch) / seconds
            mfu = 6 * sum(parameter.numel() for parameter in model.parameters()) * rate / FLOPS
            yield Row(
                work=f"TB training {name}, 128 sequences of 100 to 600 tokens, {'compiled' if compiled else 'eager'}, "
                f"prompts {'shared' if share else 'not shared'}",
                figure=f"{rate:,.0f} useful tok/s ({seconds * 1e3:.0f} ms a step, the first {first:.0f} s)",
                must=must.get(key, ""),
                limit=f"{mfu:.0%} of {FLOPS / 1e12:.0f} TFLOP/s by 6 x parameters",
            )
            del model, step
            torch.cuda.empty_cache()


def lora_rows(key: str, *, max_tokens: int = 8192) -> Iterator[Row]:
    """A LoRA adapter on a model whose full optimizer state would not fit: speed, and the memory by part."""
    model = make_model(SHAPES[key])
    add_lora(model, LoraConfig(), base=key, seed=0)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() / 1e9
    batch, step = ragged_batch(model.config.vocab_size), make_step(model, share=True, max_tokens=max_tokens)
    compile_layers(model)
    first = step_seconds(step, batch)
    seconds = float(np.median([step_seconds(step, batch) for _ in range(4)]))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    yield Row(
        work=f"TB training {SHAPES[key].name}, LoRA of {trained / 1e6:.0f}M parameters, the same sequences, compiled, "
        f"prompts shared, micro-batches of {max_tokens:,} tokens",
        figure=f"{useful_tokens(batch) / seconds:,.0f} useful tok/s ({seconds:.2f} s a step, the first {first:.0f} s); "
        f"model and adapter {held:.0f} GB, most {torch.cuda.max_memory_allocated() / 1e9:.0f}",
    )


def offload_rows(key: str, *, max_tokens: int = 8192) -> Iterator[Row]:
    """All weights of a model whose moments lie on the host: speed, where the time goes, and the memory by part."""
    model = make_model(SHAPES[key])
    weights = torch.cuda.memory_allocated() / 1e9
    step = make_step(model, share=True, max_tokens=max_tokens, offload=True)
    with_masters = torch.cuda.memory_allocated() / 1e9
    batch = ragged_batch(model.config.vocab_size)
    compile_layers(model)
    first = step_seconds(step, batch)
    torch.cuda.reset_peak_memory_stats()
    seconds = float(np.median([step_seconds(step, batch) for _ in range(3)]))
    step.gradients(batch, beta=0.05)
    torch.cuda.synchronize()
    started = time.perf_counter()
    step.optimizer.step(0.0)
    torch.cuda.synchronize()
    moving, numbers = time.perf_counter() - started, sum(parameter.numel() for parameter in model.parameters())
    yield Row(
        work=f"TB training {SHAPES[key].name}, all weights, moments on the host, the same sequences, compiled, prompts "
        f"shared, micro-batches of {max_tokens:,} tokens",
        figure=f"{useful_tokens(batch) / seconds:,.0f} useful tok/s ({seconds:.2f} s a step, of which the optimizer "
        f"{moving:.2f}; the first {first:.0f} s); weights {weights:.0f} GB, with masters {with_masters:.0f}, at most "
        f"{torch.cuda.max_memory_allocated() / 1e9:.0f}; on the host {8 * numbers / 1e9:.0f}",
        limit=f"moments over the bus, both ways at once, at 50 GB/s: {8 * numbers / 50e9:.1f} s",
    )


def check_train_rows(shapes: Sequence[str]) -> Iterator[Row]:
    """Gradients through FlashAttention, shared prompts and fused log-probs against plain fp32 attention, same weights."""
    for key in shapes:
        name, found = SHAPES[key].name, {}
        for label, dtype, share in (
            ("fp32", torch.float32, False),
            ("", torch.bfloat16, False),
            (", shared", torch.bfloat16, True),
        ):
            model = make_model(SHAPES[key], layers=2).to(dtype)
            reward_PK = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0]])
            batch = replace(ragged_batch(model.config.vocab_size, prompts=2, samples=4), reward_PK=reward_PK)
            step = make_step(model, share=share)
            step.gradients(batch, beta=0.05)
            found[label] = torch.cat([master.grad.flatten().float() for master in step.optimizer.masters])
        for label in ("", ", shared"):
            cosine = float(torch.nn.functional.cosine_similarity(found["fp32"], found[label], dim=0))
            yield Row(
                work=f"check {name} (2 layers): gradient, bf16{label} against fp32", figure=f"cosine {cosine:.5f}"
            )


def score_rows(shapes: Sequence[str]) -> Iterator[Row]:
    """The reference pass of a searcher."""
    for key in shapes:
        name, model = SHAPES[key].name, make_model(SHAPES[key])
        scorer = ReferenceScorer(model, max_length=1024, token_budget=32_768, dtype=model.dtype, device=model.device)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(3, 1000, 128) for _ in range(32)]
        answers = [rng.integers(3, 1000, rng.integers(50, 400)) for _ in range(256)]
        rates = []
        for _ in range(3):
            started = time.perf_counter()
            scorer.score([prompts[i // 8] for i in range(256)], answers, 1.0)
            rates.append(sum(map(len, answers)) / (time.perf_counter() - started))
        yield Row(work=f"reference scores {name}, 256 responses", figure=f"{max(rates):,.0f} response tok/s")
