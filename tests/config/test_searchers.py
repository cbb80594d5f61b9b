"""The devices of roles: what each searcher is made from, and what is refused."""

import re
from pathlib import Path

import pytest

from tba.config import ConfigError, dump_config, load_config

DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_without_placement_a_searcher_is_made_from_the_runs_config():
    config = load_config(None, ["search.num_searchers=2"])
    assert config.for_searcher(1) == config
    assert config.trainer_model == config.model


def test_the_slots_of_all_searchers_count_for_the_pace():
    slots = ["search.num_searchers=3", "generate.slots=128"]
    config = load_config(None, [*slots, "replay.lag=pace", "train.responses_per_step=128"])
    assert config.max_lag == 2 + 3 * 128 // 128


def test_a_config_with_placement_is_read_back_as_it_was(tmp_path):
    config = load_config(None, ["runtime.placement={trainer: cuda, searchers: [cuda:1, cuda:2]}"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_devices_come_from_the_place_then_the_model():
    config = load_config(None, ["runtime.placement={trainer: [cuda:0], searchers: [cuda:1, cuda:2]}"])
    assert [config.searcher_device(index) for index in range(3)] == ["cuda:1", "cuda:2", "cuda:1"]
    assert config.for_searcher(1).model.device == "cuda:2"
    assert config.trainer_devices == ("cuda:0",)
    assert config.trainer_model.device == "cuda:0"
    only_trainer = load_config(None, ["runtime.placement.trainer=cuda", "model.device=cpu"])
    assert (only_trainer.trainer_devices, only_trainer.searcher_device(0)) == (("cuda:0",), "cpu")
    only_searchers = load_config(None, ["runtime.placement.searchers=[cuda:1]"])
    assert (only_searchers.trainer_devices, only_searchers.searcher_device(3)) == (("auto",), "cuda:1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["runtime.placement.trainer=[cuda:0, cuda:0]", "train.ranks=2"],
            "the trainer has the devices cuda:0, cuda:0 (runtime.placement.trainer or model.device) and train.ranks=2",
        ),
        (["model.device=cuda:1", "train.ranks=2"], "name one for each rank, or none"),
        (["runtime.placement.trainer=gpu"], "device 'gpu' is not known: write cpu, cuda or cuda:1"),
        (["runtime.placement.trainers=cpu"], "unknown key runtime.placement.trainers"),
        (
            ["runtime.placement.trainer=cpu", "runtime.kind=ray"],
            "runtime.placement cannot be used with runtime.kind=ray: Ray places roles",
        ),
        (
            ["runtime.placement={trainer: cuda:0, searchers: cuda:1}", "mode=fixed_lag"],
            "runtime.placement gives the devices cuda:0, cuda:1 to a run in fixed_lag mode",
        ),
    ],
)
def test_what_cannot_be_is_explained(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert message in str(error.value)


def test_one_device_for_all_is_allowed_where_roles_take_turns():
    config = load_config(None, ["runtime.placement={trainer: cpu, searchers: cpu}", "mode=sync"])
    assert config.trainer_model.device == "cpu"


def test_the_examples_of_the_documentation_load(tmp_path):
    found = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    configs = []
    for number, text in enumerate(found):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        configs.append(load_config(path))
    (devices,) = configs
    assert devices.trainer_devices == ("cuda:0",)
    assert [devices.searcher_device(index) for index in range(3)] == ["cuda:1", "cuda:2", "cuda:3"]
