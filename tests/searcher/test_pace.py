"""Which prompts are drawn, in which order, and how some rollouts explore."""

import numpy as np

from tba.config import ExploreConfig
from tba.runtime.prompt_queue import PromptQueue, RolloutSource
from tba.searcher.rollouts import PromptStream, explore
from tba.types import Prompt, Request, Sampling

PROMPTS = [Prompt(id=f"p{i}", token_ids=np.array([1], np.int32), text=str(i)) for i in range(10)]


def stream() -> PromptStream:
    return PromptStream(PROMPTS, RolloutSource.of(PromptQueue(len(PROMPTS), seed=0)), samples_per_prompt=4)


def ids(requests) -> list[str]:
    return [request.prompt.id for request in requests]


def test_every_epoch_draws_all_prompts_once_in_a_new_order():
    rollouts = stream()
    first, second = ids(rollouts.take(10)), ids(rollouts.take(10))
    assert sorted(first) == sorted(second) == sorted(p.id for p in PROMPTS)
    assert first != second


def test_sample_indices_of_later_rollouts_follow_on():
    rollouts = stream()
    assert {request.first_sample for request in rollouts.take(10)} == {0}
    assert {request.first_sample for request in rollouts.take(10)} == {4}


def test_requests_carry_the_number_of_their_rollout():
    assert [request.rollout for request in stream().take(12)] == list(range(12))


def test_exploring_rollouts_change_behaviour_but_not_the_policy_temperature():
    config = ExploreConfig(probability=0.3, temperature=(0.5, 2.0))
    sampling = Sampling(max_new_tokens=8, temperature=0.7)
    requests = [
        explore(Request(prompt=p, first_sample=4 * v), sampling, config, seed=0) for p in PROMPTS for v in range(100)
    ]
    explored = [request.sampling for request in requests if request.sampling is not None]
    assert 240 < len(explored) < 360  # 1000 rollouts at 0.3: 300 +- 4 standard deviations of 14.5
    assert all(s.policy_temperature == 0.7 and 0.5 <= s.temperature <= 2.0 for s in explored)
    assert np.std([s.temperature for s in explored]) > 0.3
