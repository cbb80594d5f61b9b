"""A step over several ranks is the step of one: real processes with gloo, compared with a TrainStep in this process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from builders import ragged_batch, tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM, Phi3Config, StableLmConfig

from tba.config import Config
from tba.models.load import adapt, load_model
from tba.models.policy import ALONE, Ranks
from tba.observe.run_folder import RunFolder
from tba.replay.buffer import ReplayBuffer
from tba.run.rank_processes import ranks_of
from tba.runtime.channels import LocalWeights
from tba.trainer.batch import Budget, deal_prompts, deal_responses
from tba.trainer.checkpoint import Checkpoints
from tba.trainer.make_trainer import Learner, make_references, make_train_step
from tba.trainer.sharded import ConnectedRanks, RankLost, ShardedTrainStep, as_rank_lost, connected
from tba.trainer.step import NonFiniteLoss, TrainStep

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its sizes are no multiples of 4, so that ranks have unequal parts, and some parameters have fewer rows than ranks."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(hidden_size=40, num_key_value_heads=1, intermediate_size=50).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, model_path, tmp_path_factory) -> Iterator[Ranks]:
    """A process has one process group: a test that makes its own asks for 1, which ends the one before."""
    config = make_config(model_path, ranks=request.param)
    with ranks_of(config, tmp_path_factory.mktemp("logs")) as found:
        assert isinstance(found, ConnectedRanks) == (request.param > 1)
        yield found


def make_config(model_path: Path, *, ranks: int = 1, **sections) -> Config:
    # A denominator without this epsilon would turn rounding errors of gradients near 0 into whole updates.
    train = {"tokens_per_micro_batch": 40, "ranks": ranks, "adam_epsilon": 1e-3, **sections.pop("train", {})}
    model = {"path": str(model_path), "device": "cpu", **sections.pop("model", {})}
    return Config.model_validate({"model": model, "train": train, **sections})


def make_step(config: Config, ranks: Ranks = ALONE) -> TrainStep:
    if isinstance(ranks, ConnectedRanks):
        ranks.tell("begin", config=config.model_dump_json())
    loaded = load_model(config.model)
    adapt(loaded, config.model, seed=config.seed)
    return make_train_step(config, loaded, ranks)


def train(step: TrainStep, shapes: Sequence[tuple[int, int]], *, steps: Sequence[int] = range(10)) -> list[dict]:
    """Metrics of updates on ragged batches of these (prompts, responses)."""
    found = []
    for index in steps:
        P, K = shapes[index % len(shapes)]
        result = step.gradients(ragged_batch(P, K, seed=index), beta=0.1)
        # The first update is as long as it takes to move log_pi by so many nats, as that of learning_rate=auto.
        moved = step.move(1e-4 if index == 0 else 1e-2, nats=1.0 if index == 0 else None, measure=index % 3 == 0)
        found.append({**result.metrics, **moved})
    return found


def whole(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in step.weights(version=10).tensors.items()}


def assert_same_metrics(want: list[dict], got: list[dict]) -> None:
    """Of those that are sums over the batch; others are means over micro-batches, which are others here."""
    for index, (one, several) in enumerate(zip(want, got, strict=True)):
        # Adam makes a step of any gradient, also of one that is nearly zero and mostly rounding: what ranks round in another
        # order grows with the steps (1.2e-5 of a gradient's norm after five was seen).
        rel = 1e-5 if index < 4 else 1e-4
        assert one.keys() == several.keys()
        for name in one.keys() & {
            "loss",
            "tb/loss",
            "tb/log_z",
            "grad_norm",
            "update_drift",
            "own_movement",
            "learning_rate",
        }:
            assert several[name] == pytest.approx(one[name], rel=rel, abs=1e-5), (index, name)


def assert_same_weights(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert want.keys() == got.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=2e-5)


SHAPES = ((3, 4), (7, 4), (1, 5), (4, 2))
"""Steps of few prompts split a group over ranks; those of many have ranks with fewer micro-batches than others."""


def test_losses_weights_and_canary_are_those_of_one_rank_for_ten_steps(model_path, ranks):
    config = make_config(model_path)
    alone, several = make_step(config), make_step(config, ranks)
    assert_same_metrics(train(alone, SHAPES), train(several, SHAPES))
    assert_same_weights(whole(alone), whole(several))
    canary = several.canary(several.weights(version=10))
    np.testing.assert_allclose(canary, alone.canary(alone.weights(version=10)), atol=1e-4)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"objective": {"name": "tb_learned_z"}}, id="tb_learned_z"),
        pytest.param({"objective": {"name": "ppo"}}, id="ppo"),
        pytest.param({"objective": {"name": "grpo"}, "train": {"gradient_checkpointing": True}}, id="recomputed"),
        pytest.param({"model": {"lora": {"rank": 1}}}, id="lora"),
        pytest.param({"model": {"dtype": "bfloat16"}}, id="bf16"),
    ],
)
def test_heads_adapters_and_recomputed_layers_train_over_ranks_too(model_path, ranks, config):
    rounds = config.get("model", {}).get("dtype") == "bfloat16"
    config = make_config(model_path, **config)
    alone, several = make_step(config), make_step(config, ranks)
    want, got = (train(step, SHAPES, steps=range(4)) for step in (alone, several))
    if rounds:
        assert [step["loss"] for step in got] == pytest.approx([step["loss"] for step in want], rel=0.05)
    else:
        assert_same_metrics(want, got)
        assert_same_weights(whole(alone), whole(several))


def test_a_checkpoint_does_not_tell_how_many_ranks_wrote_it(model_path, ranks, tmp_path):
    """One rank goes on from it as the several that saved it, and several from it as well."""
    config = make_config(model_path, objective={"name": "ppo"})
    several, alone = make_step(config, ranks), make_step(config)
    train(several, SHAPES, steps=range(3))
    assert isinstance(several, ShardedTrainStep)
    saved = several.state()
    alone.optimizer.load_state(copy.deepcopy(saved))
    assert_same_weights(whole(alone), whole(several))
    want = train(several, SHAPES, steps=range(3, 6))
    assert_same_metrics(want, train(alone, SHAPES, steps=range(3, 6)))
    again = make_step(config, ranks)
    assert isinstance(again, ShardedTrainStep)
    again.load_state(saved)
    assert_same_metrics(want, train(again, SHAPES, steps=range(3, 6)))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_checkpoint_of_several_ranks_loads_with_from_pretrained(model_path, ranks, tmp_path):
    step = make_step(make_config(model_path), ranks)
    assert isinstance(step, ShardedTrainStep)
    train(step, SHAPES, steps=range(2))
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    checkpoints = Checkpoints(
        folder, step.policy.model, tiny_tokenizer(), step, heads=[], parts={}, keep=1, gather_weights=step.whole_weights
    )
    checkpoints.save(2)
    checkpoints.close()
    loaded = AutoModelForCausalLM.from_pretrained(folder.checkpoints / "step-2")
    assert_same_weights(whole(step), dict(loaded.named_parameters()))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_loss_that_is_not_finite_stops_before_any_rank_has_moved(model_path, ranks):
    step, config = make_step(make_config(model_path), ranks), make_config(model_path)
    bad = ragged_batch(3, 4)
    bad = replace(bad, reward_PK=torch.full_like(bad.reward_PK, float("nan")))
    with pytest.raises(NonFiniteLoss):
        step(bad, beta=0.1, learning_rate=1e-2)
    assert step.is_finite
    assert not step.moved
    assert_same_metrics(train(make_step(config), SHAPES, steps=[0]), train(step, SHAPES, steps=[0]))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_before_any_has_moved(model_path, ranks):
    step, config = make_step(make_config(model_path), ranks), make_config(model_path)
    before = whole(step)
    step.gradients(ragged_batch(3, 4), beta=0.1)
    step.optimizer.masters[0].grad.view(-1)[0] = float("inf")
    with pytest.raises(NonFiniteLoss, match="gradient norm is"):
        step.move(1e-2)
    assert not step.moved
    assert all(map(torch.equal, before.values(), whole(step).values()))
    assert_same_metrics(train(make_step(config), SHAPES, steps=[0]), train(step, SHAPES, steps=[0]))


ONE_SEQUENCE_A_PASS = {
    "not packed": (StableLmConfig, {}),
    "angles of its own for long sequences": (
        Phi3Config,
        {
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 3.0, 5.0, 8.0],
                "original_max_position_embeddings": 8,
                "factor": 8.0,
            },
        },
    ),
}


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("kind", ONE_SEQUENCE_A_PASS)
def test_a_model_that_computes_one_sequence_at_a_time_does_so_equally_often_on_every_rank(ranks, tmp_path, kind):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40}
    make, options = ONE_SEQUENCE_A_PASS[kind]
    model = make(
        hidden_size=32,
        intermediate_size=48,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **sizes,
        **options,
    )
    AutoModelForCausalLM.from_config(model).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = make_config(tmp_path)
    alone, several = make_step(config), make_step(config, ranks)
    assert several.budget.max_responses == 1
    assert_same_metrics(train(alone, SHAPES, steps=range(2)), train(several, SHAPES, steps=range(2)))
    assert_same_weights(whole(alone), whole(several))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_run_that_may_go_back_keeps_the_whole_start_model_for_its_reference(model_path, ranks):
    config = make_config(model_path, reference={"reset_every": 2}, observe={"on_collapse": "rollback"})
    learner = Learner(train_step=make_step(config, ranks), rescorer=None)
    replay = ReplayBuffer(config.replay, fresh_steps=1, seed=0, reward_names=("score",), reward_weights=(1.0,))
    references = make_references(config, learner, replay, LocalWeights(lambda weights: None))
    assert references is not None
    assert references.start is not None
    assert_same_weights(whole(make_step(make_config(model_path))), dict(references.start.tensors))


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("this rank alone has met it")])
def test_whatever_stops_rank_0_in_the_middle_ends_what_the_ranks_do_together(model_path, ranks, error, monkeypatch):
    step = make_step(make_config(model_path), ranks)
    assert isinstance(step, ShardedTrainStep)
    try:
        with monkeypatch.context() as patched:  # the others are told nothing
            patched.setattr(ranks, "tell", Mock(side_effect=error))
            with pytest.raises(type(error)):
                step.restart_log_z()
        assert ranks.lost
        assert not step.is_finite, "nobody is asked any more"
    finally:
        ranks.lost = False


def test_an_error_of_a_socket_is_the_loss_of_a_rank_and_any_other_is_what_it_is():
    with pytest.raises(RankLost, match=r"does not answer: \[gloo\] closed$"), as_rank_lost(only_of_sockets=True):
        raise RuntimeError("[gloo] closed\nby the peer")
    with pytest.raises(RuntimeError, match="shapes differ") as error, as_rank_lost(only_of_sockets=True):
        raise RuntimeError("shapes differ")
    assert not isinstance(error.value, RankLost)


def test_prompts_go_to_the_rank_with_least_to_do_and_single_responses_where_a_rank_would_get_none():
    batch, budget = ragged_batch(5, 2, seed=3), Budget(max_tokens=1000)
    dealt = deal_prompts(batch, budget, num_ranks=2)
    assert dealt is not None
    assert sorted(prompt for parts in dealt for part in parts for prompt in part) == list(range(5))
    assert deal_prompts(batch, budget, num_ranks=6) is None
    responses = deal_responses(batch, budget, range(10), num_ranks=3)
    assert [response for parts in responses for part in parts for response in part] == list(range(10))
    tokens = [sum(int(batch.lengths[r]) for part in parts for r in part) for parts in responses]
    assert max(tokens) - min(tokens) <= int(batch.lengths.max())


NEEDS_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("ranks", [1], indirect=True)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        pytest.param("cuda", "float32", marks=NEEDS_GPU),
        pytest.param("cuda", "bfloat16", marks=NEEDS_GPU),
    ],
)
def test_a_model_that_is_sharded_over_one_rank_computes_what_a_whole_one_does(
    model_path, ranks, tmp_path, device, dtype
):
    """All of the way through FSDP2, on a GPU with NCCL, but for other ranks."""
    config = make_config(model_path, model={"device": device, "dtype": dtype})
    want = train(make_step(config, ranks), SHAPES, steps=range(4))
    store, place = dist.FileStore(str(tmp_path / "meeting"), 1), torch.device(device, 0)
    with connected(store, rank=0, size=1, device=place, wait_seconds=60.0) as found:
        step = make_step(config, found)
        got = train(step, SHAPES, steps=range(4))
        whole_weights, published = whole(step), step.weights(version=10)
        canary = step.canary(published)
    assert [one["loss"] for one in got] == pytest.approx([one["loss"] for one in want], rel=1e-3)
    assert all(tensor.device.type == "cpu" for tensor in whole_weights.values())
    assert np.isfinite(canary).all()
