"""Evaluate an engine on held-out prompts: greedy accuracy, and pass@k / avg@k at the sampling temperature."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from tba.evaluate.accuracy import sampled_metrics
from tba.generate.engine import Engine
from tba.tasks.base import Task
from tba.types import Prompt, Request, Sampling


def evaluate(
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    samples_per_prompt: int = 0,
) -> dict[str, float]:
    """Metrics by name: `accuracy`, and with samples `pass@k` and `avg@k`."""
    greedy = replace(sampling, greedy=True, temperature=1.0, top_p=1.0, top_k=0)
    solved = _solved(engine, task, tokenizer, prompts, greedy, samples_per_prompt=1)
    metrics = {"accuracy": sum(samples[0] for samples in solved) / max(1, len(solved))}
    if samples_per_prompt:
        sampled = _solved(engine, task, tokenizer, prompts, sampling, samples_per_prompt=samples_per_prompt)
        metrics |= sampled_metrics(sampled, samples_per_prompt)
    return metrics


def _solved(
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    samples_per_prompt: int,
) -> list[list[bool]]:
    completions = defaultdict(list)
    requests = [Request(prompt=prompt) for prompt in prompts]
    for completion in engine.generate(requests, samples_per_prompt=samples_per_prompt, sampling=sampling):
        completions[completion.prompt_id].append(completion)
    results = []
    for prompt in prompts:
        own = completions[prompt.id]
        texts = tokenizer.batch_decode([c.token_ids.tolist() for c in own], skip_special_tokens=True)
        results.append([task.solved(outcome) for outcome in task.score(prompt, texts, own)])
    return results
