"""What a slow reward may hold up: not the responses that are still to be written, nor the workers that are free."""

from typing import ClassVar

import numpy as np
from builders import tiny_llama, tiny_tokenizer

from tba.config import Config, GenerateConfig
from tba.engine.make_engine import make_engine, make_scorer
from tba.runtime.channels import LocalGroups
from tba.runtime.prompt_queue import PromptQueue, RolloutSource
from tba.searcher.loop import SearchCounts, Searcher
from tba.searcher.process import max_unscored
from tba.searcher.rollouts import PromptStream
from tba.tasks.rewards.pool import DirectRewards
from tba.types import Prompt, Sampling

PROMPTS = [Prompt(id=name, token_ids=np.array([1, 5], np.int32), text=name) for name in ("p", "q")]


class NotingTask:
    """Notes how many rollouts were written when a reward was called."""

    reward_weights: ClassVar = {"one": 1.0}

    def __init__(self, counts: SearchCounts) -> None:
        self.counts = counts
        self.written: list[int] = []

    def score(self, prompt, texts, completions):
        self.written.append(self.counts.generated)
        return [{"one": 1.0} for _ in texts]


def test_a_synchronous_step_has_a_rollout_rewarded_while_the_next_is_written():
    counts, groups = SearchCounts(), LocalGroups()
    task = NotingTask(counts)
    model = tiny_llama(seed=0)
    searcher = Searcher(
        engine=make_engine(model, [2], GenerateConfig(slots=4), seed=0, max_length=32),
        prompts=PromptStream(PROMPTS, RolloutSource.of(PromptQueue(2, seed=0)), samples_per_prompt=4),
        rewards=DirectRewards(task),
        reference=make_scorer(model, max_length=32),
        counts=counts,
        sender=groups,
        tokenizer=tiny_tokenizer(),
        sampling=Sampling(max_new_tokens=6),
        samples_per_prompt=4,
    )
    searcher.step(2)
    assert task.written == [1, 2]
    assert [group.rollout for group in groups.drain()] == [0, 1]  # sent in the order of the rollouts all the same


def test_enough_rollouts_may_wait_for_rewards_to_keep_all_workers_busy():
    searching = {"num_searchers": 4, "reward_workers": 12}
    train = {"responses_per_step": 128, "samples_per_prompt": 8}
    assert max_unscored(Config(search=searching, train=train)) == 12 + 4
    assert max_unscored(Config(search={"num_searchers": 4}, train=train)) == 8
