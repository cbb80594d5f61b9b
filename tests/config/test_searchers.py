"""The devices of roles: what each searcher is made from, and what is refused."""

import re
from pathlib import Path

import pytest

from tba.config import ConfigError, dump_config, load_config

DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_without_devices_of_its_own_a_searcher_is_made_from_the_runs_config():
    config = load_config(None, ["search.num_searchers=2"])
    assert config.for_searcher(1) == config


def test_a_config_with_devices_is_read_back_as_it_was(tmp_path):
    config = load_config(None, ["model.device=cuda", "search.devices=[cuda:1, cuda:2]"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_searchers_take_the_devices_in_turn_or_the_models():
    config = load_config(None, ["model.device=cuda:0", "search.devices=[cuda:1, cuda:2]"])
    assert [config.searcher_device(index) for index in range(3)] == ["cuda:1", "cuda:2", "cuda:1"]
    assert config.for_searcher(1).model.device == "cuda:2"
    assert load_config(None, ["model.device=cpu"]).searcher_device(3) == "cpu"
    assert load_config(None, ["search.devices=cuda"]).searcher_device(0) == "cuda:0"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.device=cuda:1", "train.ranks=2"], "model.device=cuda:1 is one device and train.ranks=2 want one each"),
        (["search.devices=gpu"], "device 'gpu' is not known: write cpu, cuda or cuda:1"),
        (
            ["search.devices=cpu", "runtime.kind=ray"],
            "search.devices cannot be used with runtime.kind=ray, which places roles",
        ),
        (
            ["model.device=cuda:0", "search.devices=cuda:1", "mode=fixed_lag"],
            "search.devices and model.device give cuda:0, cuda:1 to a run in fixed_lag mode",
        ),
    ],
)
def test_what_cannot_be_is_explained(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    assert message in str(error.value)


def test_one_device_for_all_is_allowed_where_roles_take_turns():
    config = load_config(None, ["model.device=cpu", "search.devices=cpu", "mode=sync"])
    assert config.searcher_device(0) == "cpu"


def test_the_examples_of_the_documentation_load(tmp_path):
    found = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    configs = []
    for number, text in enumerate(found):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        configs.append(load_config(path))
    (devices,) = configs
    assert devices.model.device == "cuda:0"
    assert [devices.searcher_device(index) for index in range(3)] == ["cuda:1", "cuda:2", "cuda:3"]
