"""Devices that are named are there, and each role takes memory of its own device."""

import pytest

from tba.config import ConfigError, load_config
from tba.launch import devices
from tba.launch.defaults import slots_for, with_defaults
from tba.launch.devices import KV_BYTES, activation_bytes, check_devices, kv_bytes
from tba.launch.run import load_inputs
from tba.runtime.placement import RolePlacement

GIB = 2**30


@pytest.fixture
def gpus(monkeypatch):
    """Memory of GPUs that this machine may not have."""
    memory = {"cuda:0": 140 * GIB, "cuda:1": 24 * GIB}
    monkeypatch.setattr(devices, "gpu_bytes", memory.__getitem__)
    return memory


def placement(*overrides: str) -> RolePlacement:
    return RolePlacement.of(load_config(None, overrides))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.device=cuda:7", "model.device=cuda:7"),
        ("runtime.placement.trainer=[cuda:7]", "runtime.placement.trainer=cuda:7"),
        ("runtime.placement.searchers=[cpu, cuda:7]", "runtime.placement.searchers=cuda:7"),
        ("search.kinds={a: {count: 1}, b: {count: 1, device: cuda:7}}", "search.kinds.b.device=cuda:7"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(override, key):
    with pytest.raises(ConfigError) as error:
        check_devices(load_config(None, [override]))
    assert str(error.value).startswith(f"{key} is not there: this machine has cpu")
    assert "tba doctor" in str(error.value)


def test_cpus_are_always_there_and_a_device_that_nobody_uses_need_not_be():
    everything = "runtime.placement={trainer: cpu, searchers: cpu}"
    check_devices(load_config(None, [everything, "model.device=cuda:7"]))


def test_devices_that_nobody_uses_are_told(caplog):
    check_devices(load_config(None, ["runtime.placement={trainer: cpu, searchers: [cpu, cpu, cpu]}"]))
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("runtime.placement.searchers names 3 devices for search.num_searchers=1")


def test_a_trainer_takes_more_of_a_gpu_that_no_searcher_uses(gpus):
    assert activation_bytes(placement("model.device=cuda")) == int(0.35 * gpus["cuda:0"])
    assert activation_bytes(placement("runtime.placement={trainer: cuda, searchers: cuda:1}")) == 70 * GIB
    assert activation_bytes(placement("runtime.placement={trainer: cpu, searchers: cuda:1}")) == GIB


def test_searchers_divide_what_a_gpu_has_for_them(gpus):
    assert kv_bytes(placement("model.device=cuda"), "cuda:0") == KV_BYTES["cuda"]
    apart = "runtime.placement={trainer: cuda, searchers: cuda:1}"
    assert kv_bytes(placement(apart), "cuda:1") == 12 * GIB
    assert kv_bytes(placement(apart, "search.num_searchers=3"), "cuda:1") == 4 * GIB
    assert kv_bytes(placement(apart), "cpu") == GIB


def test_slots_are_filled_in_by_the_device_of_each_kind(gpus):
    """The small GPU has room for fewer of these long responses than the large one."""
    kinds = (
        "search.kinds={large: {count: 1, device: cuda:0}, small: {count: 1, device: cuda:1}, set: {count: 1, slots: 3}}"
    )
    config = load_config(None, [kinds, "model.device=cpu", "task.num_train_prompts=3"])
    loaded, found = load_inputs(config).loaded, RolePlacement.of(config)
    filled = with_defaults(config, loaded)
    assert filled.search.kinds["set"].slots == 3
    for name, device in (("large", "cuda:0"), ("small", "cuda:1")):
        assert filled.search.kinds[name].slots == slots_for(loaded, config.generate.max_new_tokens, found, device)
    assert filled.search.kinds["large"].slots == 256
    assert filled.generate.slots == 128, "the least, that of a searcher on the CPU"
    gpus["cuda:1"] = GIB // 16
    assert with_defaults(config, loaded).search.kinds["small"].slots < 256
    assert with_defaults(load_config(None, [kinds, "generate.slots=7"]), loaded).search.kinds["small"].slots == 7
