"""Kinds of searchers and the devices of roles: what each searcher is made from, and what is refused."""

import re
from pathlib import Path

import pytest

from tba.config import ConfigError, dump_config, load_config

DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"
KINDS = (
    "search.kinds={plain: {count: 2}, wide: {count: 1, engine: transformers, top_p: 0.9, update: drain, slots: 4, "
    "device: cpu, explore: {probability: 1, temperature: [1, 1.5]}}}"
)


def test_searchers_are_of_the_kinds_in_their_order_and_later_ones_begin_the_list_again():
    config = load_config(None, [KINDS])
    assert config.search.num_searchers == 3
    assert [config.search.kind_at(index) for index in range(7)] == 2 * ["plain", "plain", "wide"] + ["plain"]
    assert list(config.by_kind()) == ["plain", "wide"]


def test_a_searcher_has_the_settings_of_its_kind_and_otherwise_the_runs():
    config = load_config(None, [KINDS, "generate.top_p=0.95", "generate.slots=32", "model.device=cuda"])
    plain, wide, later = config.for_searcher(0), config.for_searcher(2), config.for_searcher(5)
    assert (plain.generate, plain.search.explore, plain.model) == (
        config.generate,
        config.search.explore,
        config.model,
    )
    assert (wide.generate.engine, wide.generate.top_p, wide.generate.update) == ("transformers", 0.9, "drain")
    assert (wide.generate.temperature, wide.generate.top_k) == (1.0, 0)
    assert (wide.search.explore.probability, wide.search.explore.temperature) == (1.0, (1.0, 1.5))
    assert (wide.model.device, wide.generate.slots) == ("cpu", 4)
    assert later == wide
    assert config.trainer_model == config.model


def test_without_kinds_and_placement_a_searcher_is_made_from_the_runs_config():
    config = load_config(None, ["search.num_searchers=2"])
    assert config.for_searcher(1) == config
    assert config.by_kind() == {None: config}
    assert config.search.kind_at(1) is None


def test_the_slots_of_all_kinds_count_for_the_pace():
    kinds = "search.kinds={few: {count: 2, slots: 64}, many: {count: 1}}"
    config = load_config(None, [kinds, "generate.slots=256", "replay.lag=pace", "train.responses_per_step=128"])
    assert config.max_lag == 2 + (64 + 64 + 256) // 128


def test_a_config_with_kinds_and_placement_is_read_back_as_it_was(tmp_path):
    config = load_config(None, [KINDS, "runtime.placement={trainer: cuda, searchers: [cuda:1, cuda:2]}"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert list(load_config(path).search.kinds) == ["plain", "wide"]


def test_devices_come_from_the_kind_then_the_place_then_the_model():
    kinds = "search.kinds={plain: {count: 3}, slow: {count: 1, device: cpu}}"
    config = load_config(None, [kinds, "runtime.placement={trainer: [cuda:0], searchers: [cuda:1, cuda:2]}"])
    assert [config.searcher_device(index) for index in range(5)] == ["cuda:1", "cuda:2", "cuda:1", "cpu", "cuda:1"]
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
            ["search.kinds={hot: {count: 1, temperature: 1.2}}"],
            "search.kinds.hot: temperature=1.2 cannot be a kind's own",
        ),
        (["search.kinds={hot: {count: 1, temperature: 1.2}}"], "explore: {probability: 1, temperature: [LOW, HIGH]}"),
        (["search.kinds={long: {count: 1, max_new_tokens: 9}}"], "Set generate.max_new_tokens."),
        (["search.kinds={long: {count: 1, min_new_tokens: 9}}"], "min_new_tokens=9 cannot be a kind's own"),
        (["search.kinds={a: {}}"], "search.kinds.a.count: Field required"),
        (["search.kinds={a: {count: 0}}"], "search.kinds.a.count: Input should be greater than or equal to 1, got 0"),
        (
            ["search.kinds={a: {count: 1, topp: 0.9}}"],
            "unknown key search.kinds.a.topp: did you mean search.kinds.a.top_p",
        ),
        (["search.kinds={a: {count: 1, device: tpu}}"], "search.kinds.a.device: device 'tpu' is not known: write cpu"),
        (["search.kinds={'a/b': {count: 1}}"], "'a/b' is no name of a kind in search.kinds"),
        (
            ["search.kinds={a: {count: 2}}", "search.num_searchers=3"],
            "search.num_searchers=3 contradicts search.kinds, which are 2 searchers in all: leave it out",
        ),
        (["search.kinds={a: {count: 4}}", "search.max_searchers=3"], "search.max_searchers=3 is below"),
        (["search.kinds={a: {count: 1}}", "mode=sync"], "search.kinds needs mode=async"),
        (["search.kinds={a: {count: 40}, b: {count: 30}}"], "search.num_searchers: Input should be less than or equal"),
        (
            ["search.kinds={a: {count: 1, explore: {top_p: [0.5, 2]}}}"],
            "search.kinds.a.explore: top_p=[0.5, 2.0] is no range",
        ),
        (
            ["search.kinds={a: {count: 1, explore: {reference_share: 0.01}}}"],
            "search.kinds.a.explore.reference_share=0.01 of the 8 responses of a visit is 0",
        ),
        (
            ["runtime.placement.trainer=[cuda:0, cuda:0]", "train.ranks=2"],
            "the trainer has the devices cuda:0, cuda:0 (runtime.placement.trainer or model.device) and train.ranks=2",
        ),
        (["model.device=cuda:1", "train.ranks=2"], "name one for each rank, or none"),
        (["runtime.placement.trainer=gpu"], "device 'gpu' is not known: write cpu, cuda or cuda:1"),
        (["runtime.placement.trainers=cpu"], "unknown key runtime.placement.trainers"),
        (
            ["runtime.placement.trainer=cpu", "runtime.kind=ray"],
            "runtime.placement cannot be used with runtime.kind=ray: Ray places roles, by runtime.trainer_gpus and "
            "runtime.searcher_gpus",
        ),
        (
            ["search.kinds={a: {count: 1, device: cpu}}", "runtime.kind=ray"],
            "search.kinds.a.device=cpu cannot be used with runtime.kind=ray",
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
    devices, kinds = configs
    assert devices.trainer_devices == ("cuda:0",)
    assert [devices.searcher_device(index) for index in range(3)] == ["cuda:1", "cuda:2", "cuda:3"]
    assert [kinds.search.kind_at(index) for index in range(4)] == ["plain", "plain", "wide", "other"]


def test_an_override_changes_one_setting_of_a_kind_of_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("search: {kinds: {plain: {count: 2}, wide: {count: 1, top_p: 0.9}}}\n")
    config = load_config(path, ["search.kinds.wide.top_p=0.8", "search.kinds.plain.count=3"])
    assert (config.search.num_searchers, config.search.kinds["wide"].top_p) == (4, 0.8)
