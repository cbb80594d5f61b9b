"""Searchers against the trainer at one version, by what they generate."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import ragged_batch, tiny_llama

from tba.engine.native.engine import NativeEngine
from tba.models.policy import PolicyModel
from tba.models.weights import kl_estimate, make_weights
from tba.runtime.shared_weights import SharedWeights
from tba.trainer.mismatch import LEAST_TOKENS, MismatchProbe, mismatch_of_batch
from tba.types import Prompt, Request, Sampling, Trajectory, TrajectoryGroup

TEMPERATURE = 0.7


def test_the_estimate_by_hand():
    # log ratios -0.1 and 0.2: (e^-0.1 - 1 + 0.1 + e^0.2 - 1 - 0.2) / 2
    want = (math.exp(-0.1) + 0.1 + math.exp(0.2) - 0.2 - 2) / 2
    assert kl_estimate(np.array([-1.0, -2.0]), np.array([-1.1, -1.8])) == pytest.approx(want)
    assert kl_estimate(np.array([-1.0, -2.0]), np.array([-1.0, -2.0])) == 0.0


def test_the_estimate_is_the_kl_of_what_sampled_to_the_other():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.33, 0.22])
    tokens = np.random.default_rng(0).choice(3, size=100_000, p=p)
    exact = float((p * np.log(p / q)).sum())
    assert kl_estimate(np.log(p)[tokens], np.log(q)[tokens]) == pytest.approx(exact, rel=0.02)


def test_of_a_batch_only_responses_of_the_trained_version_count():
    batch = ragged_batch(P=8, K=4)
    log_pi_N = batch.policy_N + 0.1
    version_PK = torch.full(batch.shape, 6)
    version_PK[:, 1] = 5
    log_pi_N[batch.per_token(version_PK) == 5] += 3.0  # older: not compared
    batch = replace(batch, version_PK=version_PK)
    counted = int((batch.loss_mask_N & (batch.per_token(version_PK) == 6)).sum())
    found = mismatch_of_batch(batch, log_pi_N, step=6)
    assert counted >= LEAST_TOKENS
    assert found == pytest.approx(math.exp(0.1) - 1.1, rel=1e-4)
    assert mismatch_of_batch(batch, log_pi_N, step=7) is None, "nothing is of that version"


class Run:
    """A trainer that has moved on, and the engine of a searcher that is one version behind."""

    def __init__(self, *, loads: bool = True) -> None:
        model = tiny_llama(max_position_embeddings=128)
        self.engine = NativeEngine(copy.deepcopy(model), stop_ids=[2], seed=0, slots=8, max_length=128)
        self.policy = PolicyModel(model)
        self.slots = SharedWeights.create(make_weights(model, version=0).tensors, torch.float32)
        for version in (0, 1, 2):
            published = self.slots.publish(make_weights(model, version=version).tensors, version=version)
            if version == 1:
                weights = replace(published, tensors={k: v.clone() for k, v in published.tensors.items()})
                if not loads:
                    weights = replace(weights, tensors={k: 1.05 * v for k, v in weights.tensors.items()})
                self.engine.load(weights)
            self.move()
        self.probe = MismatchProbe(self.policy, TEMPERATURE, self.slots.stored, every=10)

    @torch.no_grad()
    def move(self) -> None:
        torch.manual_seed(0)
        for parameter in self.policy.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)

    def group(self, *, spans: tuple[tuple[int, int], ...] | None = None, samples: int = 4) -> TrajectoryGroup:
        prompt = Prompt(id="p", token_ids=np.array([5, 6, 7], np.int32), text="")
        sampling = Sampling(max_new_tokens=24, min_new_tokens=24, temperature=TEMPERATURE)
        found = self.engine.generate([Request(prompt=prompt)], samples_per_prompt=samples, sampling=sampling)
        trajectories = tuple(
            Trajectory(
                completion=completion if spans is None else replace(completion, version_spans=spans),
                rewards={},
                log_ref=completion.policy_log_probs,
                reference_version=0,
                loss_mask=np.ones(len(completion.token_ids), bool),
            )
            for completion in found
        )
        return TrajectoryGroup(id="searcher-0.a/0", prompt=prompt, trajectories=trajectories)


def test_an_engine_with_the_published_weights_differs_by_rounding_though_the_trainer_has_moved_on():
    run = Run()
    run.probe.look(run.group(), step=3)
    found = run.probe.take(3)
    assert found is not None
    assert 0.0 <= found < 1e-8


def test_an_engine_with_other_weights_is_seen():
    run = Run(loads=False)
    run.probe.look(run.group(), step=3)
    found = run.probe.take(3)
    assert found is not None
    assert found > 1e-5


def test_it_is_measured_every_few_steps_and_told_once():
    run = Run()
    run.probe.look(run.group(), step=3)
    assert run.probe.take(3) is not None
    for step in range(4, 13):
        run.probe.look(run.group(), step=step)
        assert run.probe.take(step) is None
    run.probe.look(run.group(), step=13)
    assert run.probe.take(13) is not None


@pytest.mark.parametrize(
    ("what", "spans"),
    [("two versions", ((0, 1), (5, 2))), ("weights that are gone", ((0, 0),)), ("imports", ((0, -1),))],
)
def test_what_cannot_be_compared_is_left_out(what, spans):
    run = Run()
    run.probe.look(run.group(spans=spans), step=3)
    assert run.probe.take(3) is None


def test_short_groups_are_gathered_until_there_is_enough():
    run = Run()
    run.probe.look(run.group(samples=1), step=3)
    assert run.probe.take(3) is None
    for _ in range(2):
        run.probe.look(run.group(samples=1), step=4)
    assert run.probe.take(4) is not None
