"""Monte-Carlo values: steps, prefixes, and the mean reward of their continuations."""

from typing import ClassVar

import numpy as np
import pytest
from builders import tiny_llama, tiny_tokenizer

from tba.config import GenerateConfig
from tba.engine.make_engine import make_engine
from tba.searcher.values import StepValues, lost_without_values
from tba.tasks.outcomes import RewardFailed
from tba.tasks.rewards.pool import DirectRewards
from tba.tasks.task import FinishedGroup
from tba.types import Prompt, Request, Sampling

BREAK = 7
"""The token that ends a step here."""


class LengthTask:
    """Reward: number of tokens of the response; responses with token 9 fail, and none is applicable to `no_reward`."""

    name = "length"
    isolated_rewards = ()
    reward_weights: ClassVar = {"length": 0.5}

    def __init__(self, no_reward: int | None = None):
        self.scored = []
        self.no_reward = no_reward

    def score(self, prompt, texts, completions):
        assert prompt.id == "p", "rewards see the prompt itself"
        self.scored.append(completions)
        return [
            RewardFailed("token 9")
            if 9 in c.token_ids
            else {"length": None if self.no_reward in c.token_ids else float(len(c.token_ids))}
            for c in completions
        ]


def make_values(task: LengthTask | None = None, **settings) -> StepValues:
    values = StepValues(
        rewards=DirectRewards(task or LengthTask()),
        reward_weights=LengthTask.reward_weights,
        tokenizer=tiny_tokenizer(),
        **{"sampling": Sampling(max_new_tokens=10), "continuations": 4} | settings,
    )
    values._breaks[BREAK] = True
    return values


@pytest.fixture(scope="module")
def engine():
    return make_engine(tiny_llama(), [2], GenerateConfig(slots=8), seed=0, max_length=32)


PROMPT = Prompt(id="p", token_ids=np.array([1, 5], np.int32), text="w5")


def group_of(engine, samples=6, rollout=0) -> FinishedGroup:
    request = Request(prompt=PROMPT, first_sample=rollout * samples)
    found = engine.generate([request], samples_per_prompt=samples, sampling=Sampling(max_new_tokens=10))
    completions = sorted(found, key=lambda completion: completion.sample_index)
    return FinishedGroup(prompt=PROMPT, completions=completions, texts=[""] * samples)


def test_a_step_begins_at_the_start_and_after_every_line_break():
    # the break at the very end begins nothing: no token follows it
    assert make_values().step_starts(np.array([4, BREAK, 5, 6, BREAK, 8, BREAK])) == [0, 2, 5]
    assert make_values().step_starts(np.array([2])) == [0]


def test_a_value_is_the_mean_reward_of_fresh_continuations_of_the_prefix(engine):
    group = group_of(engine)
    [values] = make_values()(engine, [group])
    starts_seen = 0
    for completion, own in zip(group.completions, values):
        starts = np.flatnonzero(np.isfinite(own)).tolist()
        assert set(starts) <= set(make_values().step_starts(completion.token_ids))
        for start in starts:
            # a continuation is at least one token longer than its prefix, and scored 0.5 a token
            assert 0.5 * (start + 1) <= own[start] <= 0.5 * 10
            starts_seen += 1
    assert starts_seen > len(values), "some response has more than one step"


def test_continuations_to_which_no_reward_applies_are_left_out_of_a_value_as_those_that_failed_are(engine):
    task, group = LengthTask(no_reward=11), group_of(engine)
    [values] = make_values(task, continuations=16)(engine, [group])
    lengths = [0.5 * len(c.token_ids) for c in task.scored[0] if not {9, 11} & set(c.token_ids.tolist())]
    assert any(11 in c.token_ids for c in task.scored[0])
    assert values[0][0] == pytest.approx(np.mean(lengths))


def test_a_cut_off_continuation_counts_as_a_cut_off_response_does(engine):
    """train.truncated=penalise: a response that was cut off has the penalty, and so have the values it is compared with."""
    task, group = LengthTask(), group_of(engine)
    [plain] = make_values(task, continuations=16)(engine, [group])
    [penalised] = make_values(continuations=16, cut_off_reward=-3.0)(engine, [group])
    of_the_prompt = [c for c in task.scored[0] if 9 not in c.token_ids]
    lengths = [(c.finish, 0.5 * len(c.token_ids)) for c in of_the_prompt]
    assert {finish for finish, _ in lengths} == {"stop", "length"}, "some continuations end, others are cut off"
    assert plain[0][0] == pytest.approx(np.mean([reward for _, reward in lengths]))
    want = np.mean([-3.0 if finish == "length" else reward for finish, reward in lengths])
    assert penalised[0][0] == pytest.approx(want)


def test_nothing_is_better_than_anything_where_everything_is_cut_off(engine):
    """Eight tokens, none of them the end: every response and every continuation has the penalty."""
    sampling = Sampling(max_new_tokens=8, min_new_tokens=8)
    found = engine.generate([Request(prompt=PROMPT)], samples_per_prompt=12, sampling=sampling)
    completions = sorted(found, key=lambda completion: completion.sample_index)
    assert {completion.finish for completion in completions} == {"length"}
    values = make_values(sampling=sampling, cut_off_reward=-1.0)
    [found] = values(engine, [FinishedGroup(prompt=PROMPT, completions=completions, texts=[""] * 12)])
    # A step's advantage is V(next) - V(this), and -1 - V(this) for the last one: all are 0.
    known = np.concatenate([own[np.isfinite(own)] for own in found])
    assert set(known) == {-1.0}
    assert len(known) > len(found), "some response has more than one step"


def test_equal_prefixes_have_one_value_and_rollouts_have_their_own(engine):
    group = group_of(engine)
    [first] = make_values()(engine, [group])
    assert len({float(own[0]) for own in first}) == 1, "the empty prefix is one prefix"
    [again] = make_values()(engine, [group])
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(first, again)), "same rollout, same randomness"


def test_rollouts_that_are_valued_together_have_the_values_they_have_alone(engine):
    groups = [group_of(engine, rollout=rollout) for rollout in range(3)]
    alone = [make_values(continuations=7)(engine, [group])[0] for group in groups]
    together = make_values(continuations=7)(engine, groups)
    for own, found in zip(alone, together, strict=True):
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(own, found, strict=True))
    assert len({float(own[0][0]) for own in alone}) > 1, "another rollout continues with other random numbers"


def test_a_response_whose_first_step_has_no_value_is_lost():
    outcomes = [{"length": 1.0}, {"length": 2.0}]
    kept = lost_without_values(outcomes, [np.array([0.5, np.nan]), np.array([np.nan])])
    assert kept[0] == {"length": 1.0}
    assert isinstance(kept[1], RewardFailed)
