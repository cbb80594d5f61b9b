"""KL and the paper's perplexity, by hand."""

import math

import numpy as np
import pytest

from tba.evaluate.distance import kl_per_response, perplexity
from tba.tasks.rewards import FinishedGroup
from tba.types import Completion, Prompt


def group(prompt_tokens: int, *log_probs: list[float]) -> FinishedGroup:
    completions = [
        Completion(
            prompt_id="p",
            sample_index=index,
            token_ids=np.zeros(len(own), np.int32),
            behaviour_log_probs=np.array(own, np.float32),
            policy_log_probs=np.array(own, np.float32),
            version_spans=((0, 0),),
            finish="stop",
        )
        for index, own in enumerate(log_probs)
    ]
    prompt = Prompt(id="p", token_ids=np.zeros(prompt_tokens, np.int32), text="")
    return FinishedGroup(prompt=prompt, completions=completions, texts=[""] * len(completions))


def test_kl_is_summed_over_tokens_and_averaged_over_responses():
    groups = [group(3, [-1.0, -1.0]), group(5, [-0.5])]
    start = [np.array([-2.0, -3.0]), np.array([-1.0])]
    # (1 + 2) and 0.5: mean 1.75
    assert kl_per_response(groups, start) == pytest.approx(1.75)


def test_perplexity_divides_by_all_tokens_prompts_included():
    groups = [group(3, [-1.0, -1.0]), group(5, [-0.5])]
    start = [np.array([-2.0, -3.0]), np.array([-1.0])]
    # 6 nats over 3 + 2 + 5 + 1 = 11 tokens
    assert perplexity(groups, start) == pytest.approx(math.exp(6 / 11))
