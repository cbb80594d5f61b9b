"""How long one update takes on a CPU, of a language model of 15M parameters with 32,000 words, and where the time goes.

    python benchmarks/cpu_update.py                         # parts of an update, against the core's peak: one minute
    python benchmarks/cpu_update.py --workers 1 2           # whole updates by so many workers
    python benchmarks/cpu_update.py --workers 1 2 --busy 1  # the same beside one busy process

A batch has 32 prompts of 24 tokens with four responses of 48 to 64 tokens each. Weights are random, of the shape of
stories15M. Seconds are those of the wall clock and, in brackets, of all cores together: beside other processes the latter
say more. GFLOP/s count each product once, however often it is computed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tba.config import TrainConfig
from tba.models.cpu import use_cpu
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.train.batch import Budget
from tba.train.optimizer import MasterAdamW
from tba.train.step import TrainStep
from tba.types import Batch, Totals

PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 4, 24, (48, 64)
TIMES = 3
"""Number of times that each thing is measured; the shortest counts."""


def story_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32_000, max_position_embeddings=256, tie_word_embeddings=True, **shape)
    ).eval()


def story_batch(words: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(RESPONSE_TOKENS[0], RESPONSE_TOKENS[1] + 1, (PROMPTS * SAMPLES,), generator=generator)
    N, shape = int(lengths.sum()), (PROMPTS, SAMPLES)
    reward_PK = torch.rand(shape, generator=generator)
    return Batch(
        prompt_ids=tuple(f"p{prompt}" for prompt in range(PROMPTS)),
        prompt_tokens=tuple(torch.randint(3, words, (PROMPT_TOKENS,), generator=generator) for _ in range(PROMPTS)),
        token_ids_N=torch.randint(3, words, (N,), generator=generator),
        offsets=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        loss_mask_N=torch.ones(N, dtype=torch.bool),
        log_ref_N=-10.0 * torch.ones(N),
        behaviour_N=-10.0 * torch.ones(N),
        policy_N=-10.0 * torch.ones(N),
        rewards={"score": reward_PK.clone()},
        reward_PK=reward_PK,
        weight_PK=torch.ones(shape),
        version_PK=torch.zeros(shape, dtype=torch.long),
        truncated_PK=torch.zeros(shape, dtype=torch.bool),
        rows_PK=torch.arange(PROMPTS * SAMPLES).view(shape),
        totals=Totals(prompts=PROMPTS, responses=PROMPTS * SAMPLES, tokens=N),
    )


def make_step(tokens: int, workers: int = 1) -> TrainStep:
    policy = PolicyModel(story_model())
    optimizer = MasterAdamW(policy.model.parameters(), TrainConfig())
    objective = TrajectoryBalance(off_policy="exact")
    budget = Budget(max_tokens=tokens)
    return TrainStep(policy, objective, optimizer, budget=budget, temperature=1.0, workers=workers)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall clock and all cores, each the least of several times."""
    found = []
    for _ in range(TIMES):
        wall, cores = time.perf_counter(), time.process_time()
        work()
        found.append((time.perf_counter() - wall, time.process_time() - cores))
    return min(wall for wall, _ in found), min(cores for _, cores in found)


def peak(dtype: torch.dtype) -> float:
    """GFLOP/s of a product of two matrices of 1024 x 1024 on one core."""
    left, right = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    return 10 * 2 * 1.024**3 / seconds(lambda: [left @ right for _ in range(10)])[1]


def gflop(model: LlamaForCausalLM, batch: Batch) -> float:
    """Products of one forward pass; attention itself is left out."""
    head = model.lm_head.weight.numel()
    body = sum(parameter.numel() for parameter in model.parameters()) - head
    predicted = len(batch.token_ids_N)
    return 2e-9 * (head * predicted + body * (predicted + PROMPTS * PROMPT_TOKENS))


def plain_update(model: LlamaForCausalLM, batch: Batch) -> None:
    """The same gradients the way of transformers: padded responses, logits of 16 at once, log_softmax."""
    for first in range(0, len(batch.lengths), 16):
        rows = []
        for response in range(first, first + 16):
            own = batch.token_ids_N[batch.offsets[response] : batch.offsets[response + 1]]
            rows.append(torch.cat([batch.prompt_tokens[response // SAMPLES], own]))
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = model(tokens, logits_to_keep=tokens.shape[1] - PROMPT_TOKENS + 1).logits[:, :-1]
        log_probs = torch.log_softmax(logits, -1).gather(2, tokens[:, PROMPT_TOKENS:, None])
        log_probs.sum().backward()
    model.zero_grad()


def parts(tokens: int) -> None:
    """Print seconds and GFLOP/s of the parts of an update by one thread."""
    step, plain = make_step(tokens), story_model()
    batch = story_batch(step.policy.vocabulary)
    work = gflop(plain, batch)
    print(f"{len(batch.token_ids_N)} response tokens, {work:.0f} GFLOP a forward pass; one core reaches ", end="")
    print(f"{peak(torch.float32):.0f} GFLOP/s in fp32, {peak(torch.bfloat16):.0f} in bf16")
    micro_batches = list(step._own_micro_batches(batch, step._all_responses(batch)))
    forward = seconds(lambda: step._gather(batch, micro_batches))
    update = seconds(lambda: step.gradients(batch, beta=1.0))
    optimizer = seconds(lambda: (step.gradients(batch, beta=1.0), step.optimizer.step(1e-9)))
    rows = {
        "forward pass alone": (forward, work),
        "forward and backward": (update, 3 * work),
        "whole update": (optimizer, 3 * work),
        "plain transformers": (seconds(lambda: plain_update(plain, batch)), 3 * work),
    }
    for name, ((wall, cores), size) in rows.items():
        print(f"{name:22} {wall:6.2f} s ({cores:.2f})  {size / cores:5.0f} GFLOP/s a core", flush=True)


def updates(workers: int, tokens: int) -> None:
    """Print the seconds of a whole update by so many workers."""
    step = make_step(tokens, workers)
    batch = story_batch(step.policy.vocabulary)
    wall, cores = seconds(lambda: step(batch, beta=1.0, learning_rate=1e-9))
    print(f"{workers} workers, {tokens} tokens a micro-batch: {wall:6.2f} s ({cores:.2f})", flush=True)


def spin() -> None:
    while True:
        sum(range(10_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="numbers of workers of whole updates")
    parser.add_argument("--busy", type=int, default=0, help="number of busy processes beside")
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
    given = parser.parse_args()
    use_cpu(1)
    neighbours = [multiprocessing.Process(target=spin, daemon=True) for _ in range(given.busy)]
    for neighbour in neighbours:
        neighbour.start()
    if not given.workers:
        parts(given.tokens)
    for workers in given.workers:
        updates(workers, given.tokens)
    for neighbour in neighbours:
        neighbour.terminate()


if __name__ == "__main__":
    main()
