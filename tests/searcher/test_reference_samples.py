"""Some responses of every rollout come from the reference."""

from typing import ClassVar

import numpy as np
from builders import tiny_llama, tiny_tokenizer

from tba.config import GenerateConfig
from tba.engine.make_engine import make_engine, make_scorer
from tba.models.weights import make_weights
from tba.runtime.channels import LocalGroups
from tba.runtime.prompt_queue import PromptQueue, RolloutSource
from tba.searcher.loop import Searcher
from tba.searcher.rollouts import PromptStream, ReferenceSamples
from tba.tasks.rewards.pool import DirectRewards
from tba.types import Prompt, Sampling

PROMPT = Prompt(id="p", token_ids=np.array([1, 5], np.int32), text="w5")
SAMPLING = Sampling(max_new_tokens=6)


class ConstantTask:
    reward_weights: ClassVar = {"one": 1.0}

    def score(self, prompt, texts, completions):
        return [{"one": 1.0} for _ in texts]


def make_searcher(model, reference) -> tuple[Searcher, LocalGroups]:
    """8 samples a rollout, 2 of them from the reference."""

    def engine(own):
        return make_engine(own, [2], GenerateConfig(slots=8), seed=0, max_length=32)

    groups = LocalGroups()
    searcher = Searcher(
        engine=engine(model),
        prompts=PromptStream([PROMPT], RolloutSource.of(PromptQueue(1, seed=0)), samples_per_prompt=8),
        rewards=DirectRewards(ConstantTask()),
        reference=make_scorer(reference, max_length=32),
        sender=groups,
        tokenizer=tiny_tokenizer(),
        sampling=SAMPLING,
        samples_per_prompt=8,
        reference_samples=ReferenceSamples(engine(reference), 2, SAMPLING),
    )
    return searcher, groups


def test_a_rollout_has_the_policys_samples_first_and_then_the_references():
    searcher, groups = make_searcher(tiny_llama(seed=0), tiny_llama(seed=1))
    searcher.step(1)
    searcher.step(1)
    first, second = groups.drain()
    assert [t.completion.sample_index for t in first.trajectories] == list(range(8))
    assert [t.completion.sample_index for t in second.trajectories] == list(range(8, 16))
    for trajectory in first.trajectories[6:]:
        # the reference chose these tokens: its log-probs are the behaviour's, and the policy's are not known
        np.testing.assert_allclose(trajectory.completion.behaviour_log_probs, trajectory.log_ref, atol=1e-5)
        assert np.isnan(trajectory.completion.policy_log_probs).all()
    for trajectory in first.trajectories[:6]:
        assert np.isfinite(trajectory.completion.policy_log_probs).all()
        assert not np.allclose(trajectory.completion.behaviour_log_probs, trajectory.log_ref, atol=1e-3)


def test_both_halves_follow_a_new_reference():
    searcher, groups = make_searcher(tiny_llama(seed=0), tiny_llama(seed=1))
    searcher.load_reference(make_weights(tiny_llama(seed=2), version=3))
    searcher.step(1)
    (group,) = groups.drain()
    last = group.trajectories[-1]
    assert last.reference_version == last.completion.version == 3
    np.testing.assert_allclose(last.completion.behaviour_log_probs, last.log_ref, atol=1e-5)
