"""Where roles are, and what follows from it, over names of devices: no GPU is needed."""

import os

import pytest

from tba.config import load_config
from tba.runtime.placement import VISIBLE, RolePlacement, must_hide, see_only


@pytest.mark.parametrize(
    ("trainer", "searchers", "lie_on"),
    [
        (["cuda:0"], ["cuda:0"], "cuda:0"),
        (["cuda:1"], ["cuda:1", "cuda:1"], "cuda:1"),
        (["cuda:0"], ["cuda:1"], "cpu"),
        (["cuda:0"], ["cuda:0", "cuda:1"], "cpu"),
        (["cuda:0"], ["cpu"], "cpu"),
        (["cuda:0"], ["cuda:0", "cpu"], "cpu"),
        (["cpu"], ["cuda:0"], "cpu"),
        (["cpu"], ["cpu"], "cpu"),
        (["cuda:0", "cuda:1"], ["cuda:0"], "cpu"),
    ],
)
def test_weight_slots_lie_on_the_gpu_that_all_roles_use_or_in_host_memory(trainer, searchers, lie_on):
    found = RolePlacement(trainer=tuple(trainer), searchers=tuple(searchers), later=frozenset(searchers))
    assert found.shared_weights_device == lie_on


def placement(*overrides: str, auto: str = "cuda:0") -> RolePlacement:
    return RolePlacement.of(load_config(None, overrides), auto=auto)


def test_a_searcher_that_may_join_on_another_gpu_keeps_the_slots_in_host_memory():
    found = placement("model.device=cuda", "search.devices=[cuda:0, cuda:1]")
    assert found.searchers == ("cuda:0",)
    assert found.later == {"cuda:0", "cuda:1"}
    assert found.shared_weights_device == "cpu"


def test_auto_and_cuda_are_the_first_gpu():
    assert placement("search.devices=cuda").shared_weights_device == "cuda:0"
    assert placement("model.device=cuda").shared_weights_device == "cuda:0"
    assert placement("search.devices=cuda", auto="cpu").shared_weights_device == "cpu"
    assert placement(auto="cpu").shared_weights_device == "cpu"


def test_a_gpu_is_shared_where_several_roles_use_it():
    paper = ("model.device=cuda:0", "search.devices=[cuda:1, cuda:2, cuda:3]")
    assert placement(*paper, "search.num_searchers=3").shared_gpus == []
    assert placement(*paper, "search.num_searchers=4").shared_gpus == ["cuda:1"]
    assert placement(*paper, "search.num_searchers=5").shared_gpus == ["cuda:1", "cuda:2"]
    assert placement("search.num_searchers=2").shared_gpus == ["cuda:0"]
    assert placement("search.num_searchers=2", auto="cpu").shared_gpus == []
    assert placement("model.device=cpu", "search.devices=cuda:0").shared_gpus == []


def test_on_a_cluster_nobody_knows_who_shares_a_gpu():
    assert placement("runtime.kind=ray", "search.num_searchers=8").num_searchers_on("cuda:0") == 1
    assert placement("search.num_searchers=8").num_searchers_on("cuda:0") == 8


def test_vllm_sees_its_own_gpu_only_and_then_gets_weights_through_host_memory():
    everywhere = "model.device=cuda:1"
    native, vllm = load_config(None, [everywhere]), load_config(None, [everywhere, "generate.engine=vllm"])
    assert [must_hide(config.for_searcher(0)) for config in (native, vllm)] == [False, True]
    assert [RolePlacement.of(config).shared_weights_device for config in (native, vllm)] == ["cuda:1", "cpu"]
    assert placement("generate.engine=vllm").shared_weights_device == "cuda:0"


@pytest.mark.parametrize(("visible", "left"), [(None, "2"), ("4, 5,GPU-8d1", "GPU-8d1")])
def test_all_gpus_but_one_are_hidden(visible, left, monkeypatch):
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    assert see_only("cuda:2") == "cuda:0"
    assert os.environ[VISIBLE] == left


def test_each_rank_of_a_trainer_has_a_gpu_of_its_own_and_slots_lie_in_host_memory_then():
    found = placement("model.device=cuda", "train.ranks=2")
    assert (found.trainer, found.shared_weights_device) == (("cuda:0", "cuda:1"), "cpu")
    assert placement("model.device=cpu", "train.ranks=3").trainer == ("cpu",)
