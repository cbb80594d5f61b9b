"""From the trainer's weights to the engine's: loaded, checked, and caught when they never arrive."""

import copy
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import tiny_llama

from tba.config import GenerateConfig
from tba.engine.make_engine import make_engine
from tba.engine.native.engine import NativeEngine
from tba.models.policy import PolicyModel
from tba.models.weights import CanaryMismatch, make_weights
from tba.runtime import shared_weights as weight_slots
from tba.runtime.shared_weights import ChecksumMismatch, SharedWeights
from tba.searcher.process import MAX_UNCHECKED, WeightLoader
from tba.types import Prompt, Request, Sampling

SAMPLING = Sampling(temperature=1.0, max_new_tokens=12, min_new_tokens=12)


def request(number: int) -> Request:
    return Request(prompt=Prompt(id=f"p{number}", token_ids=np.array([5, 6, 7], np.int32), text="", columns={}))


class Trainer:
    """A model that moves, and the slots it publishes to."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, update: str = "in_flight") -> None:
        model = tiny_llama(max_position_embeddings=128).to(dtype)
        self.engine = NativeEngine(
            copy.deepcopy(model), stop_ids=[2], seed=0, slots=4, max_length=128, dtype=dtype, update=update
        )
        self.policy = PolicyModel(model)
        self.slots = SharedWeights.create(make_weights(model, version=0).tensors, dtype)
        self.connection = SimpleNamespace(weights=self.slots)
        self.publish(0)

    def publish(self, version: int) -> None:
        self.publish_without_canary(version)
        self.slots.add_canary(self.policy.canary(self.published.tensors))

    def publish_without_canary(self, version: int) -> None:
        tensors = make_weights(self.policy.model, version=version).tensors
        self.published = self.slots.publish(tensors, version=version)

    @torch.no_grad()
    def move(self, amount: float) -> None:
        torch.manual_seed(0)
        for parameter in self.policy.model.parameters():
            parameter += (amount * torch.randn(parameter.shape)).to(parameter.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newer_weights_are_loaded_and_pass_the_canary(dtype):
    trainer = Trainer(dtype)
    loader = WeightLoader(trainer.connection, trainer.engine)
    loader.check_first()
    for version in (1, 4):
        trainer.move(0.02)
        trainer.publish(version)
        loader.load_newer()
        assert trainer.engine.version == version


def test_weights_that_take_long_are_fetched_beside_the_decode_steps(monkeypatch):
    monkeypatch.setattr(weight_slots, "LONG_BYTES", 1)
    trainer, fetched, may_fetch = Trainer(), [], Event()
    loader = WeightLoader(trainer.connection, trainer.engine)
    loader.check_first()
    fetch = trainer.slots.fetch

    def fetch_when_told():
        assert may_fetch.wait(60)
        fetched.append(fetch().version)
        return fetch()

    monkeypatch.setattr(trainer.slots, "fetch", fetch_when_told)
    trainer.move(0.02)
    trainer.publish(1)
    for _ in range(3):
        loader.load_newer()
    assert trainer.engine.version == 0, "the engine goes on with what it has"
    trainer.move(0.02)
    trainer.publish(2)
    may_fetch.set()
    while trainer.engine.version == 0:
        loader.load_newer()
    assert (trainer.engine.version, fetched) == (2, [2])


def test_a_fetch_that_fails_beside_the_decode_steps_ends_the_searcher(monkeypatch):
    monkeypatch.setattr(weight_slots, "LONG_BYTES", 1)
    trainer = Trainer()
    loader = WeightLoader(trainer.connection, trainer.engine)
    loader.check_first()
    trainer.publish(1)
    trainer.slots._data[1][0] += 1

    def load_until_it_fails() -> None:
        while True:
            loader.load_newer()

    with pytest.raises(ChecksumMismatch, match="version 1"):
        load_until_it_fails()


def test_weights_that_take_long_are_checked_although_the_trainer_publishes_faster(monkeypatch):
    """By the time the copy of a version is there, its slot holds one of two publications later."""
    monkeypatch.setattr(weight_slots, "LONG_BYTES", 1)
    trainer, reported = Trainer(), []
    loader = WeightLoader(trainer.connection, trainer.engine, report=reported.append)
    loader.check_first()
    for version in (1, 4, 7):
        trainer.move(0.02)
        trainer.publish(version)
        loader.load_newer()
        loader._fetching.result()
        for overtaking in (1, 2):
            trainer.move(0.02)
            trainer.publish(version + overtaking)
        loader.load_newer()
        assert trainer.engine.version == version
        loader.load_newer()  # begins with the next one, which nobody waits for
        loader._fetching.result()
        loader.load_newer()
    assert len(reported) == 1 + 2 * 3, "the first version, then every one that was loaded"


def test_weights_that_wait_for_running_responses_are_checked_although_newer_ones_wait_by_then():
    trainer, reported = Trainer(update="drain"), []
    loader = WeightLoader(trainer.connection, trainer.engine, report=reported.append)
    loader.check_first()

    def between_steps() -> None:
        loader.load_newer()
        trainer.move(0.01)
        trainer.publish(trainer.published.version + 1)

    requests = [request(number) for number in range(12)]  # in the engine's four slots three times
    responses = trainer.engine.generate(requests, samples_per_prompt=1, sampling=SAMPLING, between_steps=between_steps)
    used = [completion.version for completion in responses]
    # Version 1 is given at the second step and waits until the 12 tokens of the first four responses are there.
    assert sorted(set(used)) == [0, 1, 12]
    assert len(reported) == 3, "each version that chose a token"


@pytest.mark.parametrize("engine", ["native", "transformers"])
@pytest.mark.parametrize(("published", "computed"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_an_engine_of_another_precision_than_the_trainers_casts_what_it_loads(published, computed, engine):
    """A searcher on the CPU beside a trainer on a GPU, and the other way round."""
    trainer, settings = Trainer(published), GenerateConfig(engine=engine, slots=4)
    start = tiny_llama(max_position_embeddings=128).to(computed)
    searcher = make_engine(start, [2], settings, seed=0, max_length=128)
    reported = []
    loader = WeightLoader(trainer.connection, searcher, report=reported.append)
    loader.check_first()
    for version in (1, 4):
        trainer.move(0.02)
        trainer.publish(version)
        loader.load_newer()
        assert searcher.version == version
    assert len(reported) == 3
    assert max(reported) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_far_engine_and_trainer_are_apart_is_reported_for_every_version_that_is_compared(dtype):
    trainer, reported = Trainer(dtype), []
    loader = WeightLoader(trainer.connection, trainer.engine, report=reported.append)
    loader.check_first()
    loader.load_newer()
    assert len(reported) == 1, "nothing new to compare"
    trainer.move(0.02)
    trainer.publish(1)
    loader.load_newer()
    assert len(reported) == 2
    assert all(0.0 <= kl < (1e-8 if dtype == torch.float32 else 1e-2) for kl in reported)

    trainer.engine.load = lambda weights: setattr(trainer.engine, "version", weights.version)  # loads nothing
    trainer.move(0.1)
    trainer.publish(2)
    with pytest.raises(CanaryMismatch):
        loader.load_newer()
    assert reported[2] > 10 * max(*reported[:2], 1e-6), "what ends the run is reported too"


def test_the_engine_then_gives_the_trainers_log_probs():
    trainer = Trainer()
    loader = WeightLoader(trainer.connection, trainer.engine)
    loader.check_first()
    trainer.move(0.1)
    trainer.publish(1)
    loader.load_newer()
    prompt, response = np.array([5, 6, 7]), np.array([8, 9, 2])
    ids = torch.tensor([5, 6, 7, 8, 9, 2])
    model = tiny_llama(max_position_embeddings=128)
    model.load_state_dict(trainer.policy.model.state_dict())
    with torch.no_grad():
        want = torch.log_softmax(model(ids[None]).logits[0, 2:5], -1).gather(1, ids[3:, None])[:, 0].numpy()
    assert np.abs(trainer.engine.score([prompt], [response], 1.0)[0] - want).max() < 1e-4


def test_a_searcher_that_starts_late_begins_with_the_newest_version():
    trainer = Trainer()
    trainer.move(0.02)
    trainer.publish(1)
    loader = WeightLoader(trainer.connection, trainer.engine)
    loader.check_first()
    assert trainer.engine.version == 1
    trainer.move(0.02)
    trainer.publish(2)
    loader.load_newer()
    assert trainer.engine.version == 2


def test_weights_are_used_before_their_canary_comes_and_are_checked_then():
    trainer = Trainer()
    loader = WeightLoader(trainer.connection, trainer.engine)
    loader.check_first()
    trainer.engine.load = lambda weights: setattr(trainer.engine, "version", weights.version)  # loads nothing
    trainer.move(0.02)
    trainer.publish_without_canary(1)
    loader.load_newer()
    loader.load_newer()
    assert trainer.engine.version == 1, "in use, and nothing to compare with yet"
    trainer.slots.add_canary(trainer.policy.canary(trainer.published.tensors))
    with pytest.raises(CanaryMismatch, match="canary of version 1"):
        loader.load_newer()


def test_after_too_many_unchecked_versions_only_one_with_a_canary_is_loaded():
    trainer = Trainer()
    loader = WeightLoader(trainer.connection, trainer.engine)
    loader.check_first()
    for version in range(1, MAX_UNCHECKED + 2):
        trainer.publish_without_canary(version)
        loader.load_newer()
    assert trainer.engine.version == MAX_UNCHECKED, "the next one is held back"
    trainer.slots.add_canary(trainer.policy.canary(trainer.published.tensors))
    loader.load_newer()
    assert trainer.engine.version == MAX_UNCHECKED + 1


def test_an_engine_of_another_model_is_caught_at_once():
    trainer = Trainer()
    other = NativeEngine(tiny_llama(seed=5, max_position_embeddings=128), stop_ids=[2], seed=0, slots=4, max_length=128)
    with pytest.raises(CanaryMismatch, match="canary of version 0"):
        WeightLoader(trainer.connection, other).check_first()


def test_an_engine_that_says_it_loaded_but_did_not_is_caught():
    trainer = Trainer()
    loader = WeightLoader(trainer.connection, trainer.engine)
    loader.check_first()
    trainer.engine.load = lambda weights: setattr(trainer.engine, "version", weights.version)
    trainer.move(0.02)
    trainer.publish(1)
    with pytest.raises(CanaryMismatch, match="canary of version 1"):
        loader.load_newer()


def test_a_flipped_byte_is_not_loaded():
    trainer = Trainer()
    loader = WeightLoader(trainer.connection, trainer.engine)
    loader.check_first()
    trainer.publish(1)
    next(iter(trainer.slots._tensors[1].values())).view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(ChecksumMismatch, match="version 1 have checksum"):
        loader.load_newer()
    assert trainer.engine.version == 0
