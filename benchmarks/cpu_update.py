"""How long one update takes on a CPU, of a language model of 15M parameters with 32,000 words.

    python benchmarks/cpu_update.py --workers 1 2           # by one and by two workers
    python benchmarks/cpu_update.py --workers 1 2 --busy 1  # the same beside one busy process

A batch has 32 prompts of 24 tokens with four responses of 48 to 64 tokens each. Weights are random, of the shape of
stories15M. Seconds are those of the wall clock and, in brackets, of all cores together: beside other processes the latter
say more.
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
from tba.models.load import use_cpu
from tba.models.policy import PolicyModel
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.trainer.batch import Budget
from tba.trainer.optimizer import MasterAdamW
from tba.trainer.step import TrainStep
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
    objective = TrajectoryBalance(trust_region="none")
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
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="numbers of workers")
    parser.add_argument("--busy", type=int, default=0, help="number of busy processes beside")
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
    given = parser.parse_args()
    use_cpu(1)
    neighbours = [multiprocessing.Process(target=spin, daemon=True) for _ in range(given.busy)]
    for neighbour in neighbours:
        neighbour.start()
    for workers in given.workers:
        updates(workers, given.tokens)
    for neighbour in neighbours:
        neighbour.terminate()


if __name__ == "__main__":
    main()
