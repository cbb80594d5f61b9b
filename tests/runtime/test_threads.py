"""The cores of a machine, shared out among the processes of a run."""

import os
from pathlib import Path

import pytest

from tba.config import load_config
from tba.runtime import placement
from tba.runtime.placement import RoleThreads, threads_alone, threads_of, usable_cores, workers_of


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of so many cores, without a GPU, where nobody has pinned anything; returns where its files are."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(placement, "SYSTEM", tmp_path)

    def of(cores: int, *, allowed: set[int] | None = None) -> Path:
        """Hardware threads 0 to cores - 1 and cores to 2 cores - 1 are the first and second of each core."""
        there = set(range(2 * cores)) if allowed is None else allowed
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: there, raising=False)
        for thread in range(2 * cores):
            write(tmp_path, f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list", f"{thread % cores},x")
        return tmp_path

    return of


def write(system: Path, path: str, text: str) -> None:
    (system / path).parent.mkdir(parents=True, exist_ok=True)
    (system / path).write_text(text)


@pytest.mark.parametrize(
    ("cores", "settings", "trainer", "searcher"),
    [
        (1, [], 1, 1),
        (2, [], 1, 1),
        (3, [], 1, 1),
        (4, [], 2, 2),  # with one core left the searcher would have one thread instead of two
        (5, [], 2, 2),
        (6, [], 3, 2),  # what does not go round is the trainer's
        (6, ["search.num_searchers=2"], 2, 2),
        (9, [], 4, 4),  # one core is left for what else there is
        (2, ["search.num_searchers=12"], 1, 1),
        (13, ["search.num_searchers=4"], 4, 2),
        (17, ["search.num_searchers=12"], 4, 1),
        (9, ["train.ranks=2", "search.num_searchers=2"], 2, 2),
        (8, ["model.device=cuda"], 1, 1),
        (10, ["model.device=cuda:0", "search.devices=[cpu, cpu]", "search.num_searchers=2"], 1, 4),
        (8, ["runtime.kind=ray"], 1, 1),
        (8, ["runtime.kind=ray", "runtime.threads=6"], 6, 6),
        (8, ["runtime.threads=3"], 3, 3),
    ],
)
def test_cores_are_shared_out(machine, cores, settings, trainer, searcher):
    machine(cores)
    assert threads_of(load_config(None, settings)) == RoleThreads(trainer=trainer, searcher=searcher)


@pytest.mark.parametrize(
    ("cores", "settings", "workers"),
    [
        (1, [], 1),
        (2, [], 2),  # beside the searcher, which has one thread
        (2, ["mode=sync"], 2),
        (4, [], 2),  # the searcher has two, which must not wait for each other
        (4, ["mode=sync"], 4),
        (8, ["search.num_searchers=7"], 8),
        (64, ["mode=sync"], 16),
        (8, ["runtime.threads=3"], 3),
        (8, ["model.device=cuda"], 1),
        (9, ["train.ranks=2", "search.num_searchers=2"], 2),
        (8, ["runtime.kind=ray", "runtime.threads=6"], 6),
    ],
)
def test_a_trainer_has_a_worker_for_each_core(machine, cores, settings, workers):
    machine(cores)
    assert workers_of(load_config(None, settings)) == workers


def test_a_trainer_has_no_more_workers_than_the_environment_allows(machine, monkeypatch):
    machine(8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert workers_of(load_config(None, ["mode=sync"])) == 3


@pytest.mark.parametrize("mode", ["mode=sync", "mode=fixed_lag"])
def test_roles_that_take_turns_have_the_machine_to_themselves(machine, mode):
    machine(9)
    assert threads_of(load_config(None, [mode])).trainer == 8
    assert threads_alone(load_config(None, [mode])) == 8


def test_a_number_that_is_given_holds_and_that_of_the_environment_is_the_most(machine, monkeypatch):
    """As in a shell or an image that sets it to the number of cores."""
    machine(9)
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert threads_of(load_config(None, ["search.num_searchers=3"])) == RoleThreads(trainer=2, searcher=2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert threads_of(load_config(None, [])) == RoleThreads(trainer=3, searcher=3)
    assert threads_of(load_config(None, ["mode=sync", "runtime.threads=5"])).trainer == 5
    assert (threads_alone(load_config(None, [])), threads_alone(load_config(None, ["runtime.threads=2"]))) == (3, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert threads_of(load_config(None, [])) == RoleThreads(trainer=4, searcher=4)
    machine(64)
    assert threads_alone(load_config(None, [])) == 16


def test_a_searcher_that_joins_later_has_its_share_of_what_there_is_then(machine):
    machine(9)
    config = load_config(None, [])
    assert [threads_of(config, num_searchers=count).searcher for count in (1, 2, 3, 7, 8)] == [4, 2, 2, 1, 1]


def test_a_gpu_is_seen_under_any_number_unless_it_is_hidden(machine, monkeypatch):
    write(machine(9), "dev/nvidia3", "")
    assert threads_of(load_config(None, [])) == RoleThreads(trainer=1, searcher=1)
    assert (threads_alone(load_config(None, [])), threads_alone(load_config(None, ["model.device=cpu"]))) == (1, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert threads_of(load_config(None, [])) == RoleThreads(trainer=4, searcher=4)


@pytest.mark.parametrize(("allowed", "found"), [({0, 8}, 1), ({0, 1, 9}, 2), ({3}, 1), (set(range(16)), 8)])
def test_two_hardware_threads_of_one_core_are_one_core(machine, allowed, found):
    machine(8, allowed=allowed)
    assert usable_cores() == found


@pytest.mark.parametrize(
    ("group", "files", "found"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "1600000 100000"}, 8),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "200000 100000"}, 2),
        ("4:memory:/x\n3:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ("3:cpu,cpuacct:/y", {"cpu/y/cpu.cfs_quota_us": "-1", "cpu/y/cpu.cfs_period_us": "100000"}, 8),
        ("0::/", {"cpu.max": "?"}, 8),
    ],
)
def test_a_container_may_use_less_than_the_machine_has(machine, group, files, found):
    system = machine(8)
    write(system, "proc/self/cgroup", group + "\n")
    for name, text in files.items():
        write(system, f"sys/fs/cgroup/{name}", text + "\n")
    assert usable_cores() == found
