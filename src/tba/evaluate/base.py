"""What an evaluator is, and what all of them do first: generate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from tba.generate.engine import Engine
from tba.tasks.rewards.pool import FinishedGroup
from tba.types import Completion, Prompt, Request, Sampling

BetweenSteps = Callable[[], None]


class Evaluator(Protocol):
    """Says how good an engine's weights are, by metrics; the first one is the headline."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Empty = there is nothing to evaluate on."""
        ...

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]: ...


def respond(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int,
    sampling: Sampling,
    between_steps: BetweenSteps | None = None,
) -> list[FinishedGroup]:
    """The responses to each prompt, in the order of the prompts, samples in order."""
    completions: dict[str, list[Completion]] = defaultdict(list)
    requests = [Request(prompt=prompt) for prompt in prompts]
    for completion in engine.generate(
        requests, samples_per_prompt=samples_per_prompt, sampling=sampling, between_steps=between_steps
    ):
        completions[completion.prompt_id].append(completion)
    return [_group(tokenizer, prompt, completions[prompt.id]) for prompt in prompts]


def in_parts(count: int, size: int, between_steps: BetweenSteps | None) -> Iterator[slice]:
    """Slices of `size`, with a sign of life before each: what scores many responses at once may take minutes."""
    for start in range(0, count, size):
        if between_steps is not None:
            between_steps()
        yield slice(start, start + size)


def greedy(sampling: Sampling) -> Sampling:
    return replace(sampling, greedy=True, temperature=1.0, top_p=1.0, top_k=0)


def _group(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completions: Sequence[Completion]) -> FinishedGroup:
    ordered = sorted(completions, key=lambda completion: completion.sample_index)
    texts = tokenizer.batch_decode([c.token_ids.tolist() for c in ordered], skip_special_tokens=True)
    return FinishedGroup(prompt=prompt, completions=ordered, texts=texts)
