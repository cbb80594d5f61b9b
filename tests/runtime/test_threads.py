"""The cores of a machine, shared out among the processes of a run."""

import os

import psutil
import pytest

from tba.config import load_config
from tba.runtime import threads
from tba.runtime.threads import RoleThreads, threads_alone, threads_of, usable_cores


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of so many cores, without a GPU, where nobody has pinned anything."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(threads, "_sees_gpu", lambda: False)

    def of(cores: int, *, threads_each: int = 1) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores * threads_each)), raising=False)
        monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: cores * (threads_each if logical else 1))

    return of


@pytest.mark.parametrize(
    ("cores", "settings", "trainer", "searcher"),
    [
        (1, [], 1, 1),
        (2, [], 1, 1),
        (8, [], 4, 4),
        (9, [], 5, 4),  # what does not go round is the trainer's
        (2, ["search.num_searchers=12"], 1, 1),
        (12, ["search.num_searchers=4"], 4, 2),
        (16, ["search.num_searchers=12"], 4, 1),
        (16, ["search.num_searchers=1", "search.max_searchers=12"], 4, 1),
        (8, ["train.ranks=2", "search.num_searchers=2"], 2, 2),
        (8, ["model.device=cuda"], 1, 1),
        (9, ["runtime.placement={trainer: [cuda:0], searchers: [cpu, cpu]}", "search.num_searchers=2"], 1, 4),
        (8, ["runtime.kind=ray"], 1, 1),
        (8, ["runtime.kind=ray", "runtime.trainer_cpus=6", "runtime.searcher_cpus=0.5"], 6, 1),
        (8, ["runtime.threads=3"], 3, 3),
    ],
)
def test_cores_are_shared_out(machine, cores, settings, trainer, searcher):
    machine(cores)
    assert threads_of(load_config(None, settings)) == RoleThreads(trainer=trainer, searcher=searcher)


@pytest.mark.parametrize("mode", ["mode=sync", "mode=fixed_lag"])
def test_roles_that_take_turns_have_the_machine_to_themselves(machine, mode):
    machine(8)
    assert threads_of(load_config(None, [mode])).trainer == 8
    assert threads_alone(load_config(None, [mode])) == 8


def test_a_number_that_is_given_holds_and_that_of_the_environment_where_none_is(machine, monkeypatch):
    machine(8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert threads_of(load_config(None, [])) == RoleThreads(trainer=3, searcher=3)
    assert threads_of(load_config(None, ["mode=sync", "runtime.threads=2"])).trainer == 2
    assert (threads_alone(load_config(None, [])), threads_alone(load_config(None, ["runtime.threads=2"]))) == (3, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert threads_of(load_config(None, [])) == RoleThreads(trainer=4, searcher=4)


@pytest.mark.parametrize(
    ("quota", "found"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("?", 8)]
)
def test_a_container_may_use_less_than_the_machine_has(machine, tmp_path, quota, found):
    machine(8, threads_each=2)  # and a core is one core
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores() == found
