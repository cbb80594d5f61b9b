"""The pull to the reference, and resets: what becomes of groups that another one scored, and how a run goes back."""

import math

import numpy as np
import pytest
import torch
from builders import tiny_llama
from resolved import resolved

from tba.config import load_config
from tba.models.weights import make_weights
from tba.trainer.reference import Beta, ReferenceResets, on_cpu
from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup


def beta_of(*overrides: str) -> Beta:
    return Beta(resolved(load_config(None, ["train.max_steps=100", *overrides])))


def test_beta_falls_where_the_distance_to_the_reference_would_cost_more_than_a_twentieth_of_a_reward():
    beta = beta_of("generate.max_new_tokens=64")
    assert beta.at(0, 0) == 0.01
    for _ in range(200):
        beta.follow({"kl": 5.0})
    assert beta.at(1, 0.01) == 0.01  # .01 x 5 nats = .05
    beta.follow({"kl": 13.0})  # the mean over some 8 steps: 5 + 8 / 8 = 6 nats
    assert beta.at(2, 0.02) == pytest.approx(0.05 / 6)
    for _ in range(200):
        beta.follow({"kl": 40.0})
    assert beta.at(3, 0.03) == pytest.approx(0.05 / 40)
    beta.follow({"kl": math.nan})  # a step of empty batches
    beta.follow({})
    assert beta.at(4, 0.04) == pytest.approx(0.05 / 40)
    beta.kl = 0.0  # the reference is the policy itself now
    assert beta.at(5, 0.05) == 0.01


def test_a_beta_that_is_given_stays_as_it_is_and_may_be_bounded_too():
    far = {"kl": 1e3}
    for settings, expected in (
        (["objective.beta=0.01"], 0.01),
        (["objective.name=grpo"], 0.04),
        (["objective.beta={kind: linear, start: 0.9, end: 0.1}"], 0.5),
        (["objective.beta=0.01", "objective.max_kl_penalty=0.2"], 0.2 / 1e3),
        (["objective.max_kl_penalty=0.2"], 0.2 / 1e3),
    ):
        beta = beta_of(*settings)
        for _ in range(300):
            beta.follow(far)
        assert beta.at(50, 0.5) == pytest.approx(expected), settings


def test_the_distance_is_part_of_a_checkpoint():
    beta, again = beta_of(), beta_of()
    for _ in range(20):
        beta.follow({"kl": 30.0})
    again.load_state(beta.state())
    assert again.at(20, 0.2) == beta.at(20, 0.2) < 0.01


class Published:
    """Where references go: the versions, and the first number of each."""

    def __init__(self):
        self.versions, self.numbers = [], []

    def publish(self, weights):
        self.versions.append(weights.version)
        self.numbers.append(float(next(iter(weights.tensors.values())).flatten()[0]))


class Dropped:
    """What a reset asks of the replay buffer."""

    def drop_reference(self, version_below):
        return 0


def group(reference_version: int) -> TrajectoryGroup:
    completion = Completion(
        prompt_id="p",
        sample_index=0,
        token_ids=np.array([5], np.int32),
        behaviour_log_probs=np.zeros(1, np.float32),
        policy_log_probs=np.zeros(1, np.float32),
        version_spans=((0, 0),),
        finish="stop",
    )
    trajectory = Trajectory(
        completion=completion,
        rewards={"r": 1.0},
        log_ref=np.zeros(1, np.float32),
        reference_version=reference_version,
        loss_mask=np.ones(1, bool),
    )
    prompt = Prompt(id="p", token_ids=np.array([1], np.int32), text="p")
    return TrajectoryGroup(id="searcher-0.aa/0", prompt=prompt, trajectories=(trajectory,), num_lost=1)


class Scorer:
    def score(self, prompt_ids, response_ids, temperature):
        return [np.full(len(ids), -2.0, np.float32) for ids in response_ids]


def resets(**options) -> ReferenceResets:
    return ReferenceResets(every=4, publisher=Published(), replay=Dropped(), temperature=1.0, version=4, **options)


def test_a_group_of_a_reference_that_is_gone_is_scored_anew_or_lost():
    """A trainer whose reference is of version 4 resumes a run that had come to the reference of version 8."""
    lost = resets().admit(group(8))
    assert (lost.trajectories, lost.num_lost, lost.num_generated) == ((), 2, 2)
    (scored,) = resets(scorer=Scorer()).admit(group(8)).trajectories
    assert (scored.reference_version, scored.log_ref.tolist()) == (4, [-2.0])
    for reference in (4, 0):  # an earlier one's is refused by the buffer
        assert len(resets().admit(group(reference)).trajectories) == 1


def test_a_run_that_goes_back_before_its_first_reset_has_the_start_model_as_its_reference_again():
    model = tiny_llama()
    start = on_cpu(make_weights(model, version=0))
    references = ReferenceResets(every=4, publisher=Published(), replay=Dropped(), temperature=1.0, start=start)
    before = references.state()
    references.load_state(before)
    assert references.publisher.versions == [], "a process that resumes has the start model already"
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert references.reset_if_due(make_weights(model, version=4))
    references.load_state(before)
    assert (references.version, references.publisher.versions) == (0, [4, 0])
    reset, restored = references.publisher.numbers
    assert reset - restored == 1.0
