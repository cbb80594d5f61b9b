"""Roles on a Ray cluster: searchers get the trainer's weights, their groups arrive, and one whose node is gone is replaced.
And copies of the run folder between nodes. The cluster is real: several nodes on loopback, with a token; all tests share it.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import takewhile
from threading import Thread

import cloudpickle
import numpy as np
import pytest
import targets
import torch

from tba.config import Config, ConfigError, load_config
from tba.models.weights import make_weights
from tba.observe.run_folder import MANIFEST, FolderInUse, Holder, RunFolder
from tba.runtime.connection import LocalRuntime
from tba.runtime.counters import SharedCounters
from tba.runtime.links import ConnectionHandle, pickled
from tba.runtime.prompt_queue import PromptQueue
from tba.runtime.shared_weights import SharedWeights
from tba.runtime.weight_memory import Header, data_bytes

pytestmark = pytest.mark.slow

# Ray reads them when it is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

DEADLINE_SECONDS = 90.0


@pytest.fixture(scope="module")
def nodes():
    """A head without room for searchers; a test adds nodes with room for one each."""
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


# Copies of a run folder between nodes: what is there, whole checkpoints only, and where a trainer starts. The actor is a
# real one of the cluster; the disks of two nodes are two folders. First, while no node is lost: Ray may still choose one.

OWNER = Holder.of_this_process()


@pytest.fixture
def here(tmp_path):
    """The run folder on the trainer's node."""
    folder = RunFolder(tmp_path / "here" / "run")
    folder.claim(holder=OWNER)
    folder.clear(overwrite=False)
    folder.config.write_text("seed: 0\n")
    return folder


@pytest.fixture
def copy(tmp_path):
    from tba.runtime.cluster.copies import RunCopy

    return RunCopy(RunFolder.create(tmp_path / "copy", overwrite=False))


def host_of(folder: RunFolder):
    """The actor of a trainer that has this run folder."""
    from tba.runtime.cluster.roles import CONCURRENCY_GROUPS, RoleHost

    make = ray.remote(num_cpus=0, concurrency_groups=CONCURRENCY_GROUPS)
    return make(RoleHost).remote(name="trainer", searcher=None, search_path=sys.path, copied=folder.path)


def save(folder: RunFolder, name: str, content: bytes, *, digest: str | None = None) -> None:
    path = folder.checkpoints / name
    path.mkdir()
    (path / "weights").write_bytes(content)
    wanted = {"bytes": len(content), "sha256": digest or hashlib.sha256(content).hexdigest()}
    (path / MANIFEST).write_text(json.dumps({"format": 1, "files": {"weights": wanted}}))


def follow(copy, actor, folder: RunFolder) -> None:
    from tba.runtime.cluster.copies import what_is_there

    copy.follow(actor, what_is_there(folder), wait=True)


@pytest.mark.usefixtures("nodes")
def test_a_copy_follows_its_run_and_becomes_the_run_folder_of_another_node(here, copy, tmp_path, monkeypatch):
    from tba.runtime.cluster.copies import begun_at, write_block

    monkeypatch.setattr("tba.runtime.cluster.copies.BLOCK_BYTES", 3)  # of this process: what is handed over, in parts
    actor = host_of(here)
    follow(copy, actor, here)
    assert copy.folder.config.read_text() == "seed: 0\n"
    save(here, "step-5", b"0123456789")
    save(here, "evaluated-step-6", b"")
    here.metrics.write_text('{"step": 1}\n')
    follow(copy, actor, here)
    save(here, "step-10", b"abc")
    for file in sorted((here.checkpoints / "step-5").iterdir()):
        file.unlink()
    follow(copy, actor, here)
    assert [path.name for path in copy.folder.checkpoints.iterdir()] == ["step-10"]
    save(here, "best-step-9", b"0123456789")
    follow(copy, actor, here)

    there = RunFolder(tmp_path / "there" / "run")
    there.logs.mkdir(parents=True)
    (there.logs / "searcher-0.log").write_text("words")
    other = host_of(there)
    assert ray.get(other.with_folder.remote(begun_at, OWNER, False)) is None
    for name in takewhile(lambda name: name != "config.yaml", copy._names()):  # cut off before its end
        if (copy.folder.path / name).is_file():
            ray.get(other.with_folder.remote(write_block, name, 0, (copy.folder.path / name).read_bytes()))
    assert there.metrics.is_file()
    assert ray.get(other.with_folder.remote(begun_at, OWNER, True)) is None
    assert copy.hand_over(other, None, OWNER, False)
    assert ray.get(other.with_folder.remote(begun_at, OWNER, True)) == 10
    assert (there.checkpoints / "best-step-9" / "weights").read_bytes() == b"0123456789"
    assert there.metrics.read_text() == '{"step": 1}\n'
    assert (there.logs / "searcher-0.log").read_text() == "words"
    # Where the run has come as far, it stays as it is.
    assert not copy.hand_over(other, 10, OWNER, False)
    assert not copy.hand_over(other, 11, OWNER, False)


@pytest.mark.usefixtures("nodes")
def test_a_checkpoint_that_arrives_damaged_does_not_count(here, copy, caplog):
    actor = host_of(here)
    save(here, "step-5", b"good")
    follow(copy, actor, here)
    save(here, "step-10", b"bad", digest="0" * 64)
    follow(copy, actor, here)
    assert list(copy.folder.checkpoints_by_step()) == [5]
    assert "step-10/weights has another checksum than its manifest says" in caplog.text


def test_a_run_folder_of_another_run_is_put_aside_and_that_of_a_living_one_is_refused(here):
    from tba.runtime.cluster.copies import begun_at, make_room

    stranger = replace(OWNER, time=0.0)
    assert begun_at(here, OWNER, False) == -1
    assert begun_at(here, stranger, False) is None
    with pytest.raises(FolderInUse):
        make_room(here, stranger, False)
    here.release()
    make_room(here, stranger, False)
    (aside,) = here.path.parent.iterdir()
    assert aside.name.startswith("run.before-")
    assert (aside / "config.yaml").is_file()


# Roles


class Run:
    """A trainer in this process, with its searchers on the cluster."""

    def __init__(self, logs) -> None:
        from tba.runtime.cluster.roles import ClusterSearchers

        config, counters = Config(runtime={"kind": "ray"}), SharedCounters.create()
        self.searchers = ClusterSearchers(config, counters, logs)
        self.groups: list[str] = []
        self.runtime = LocalRuntime(
            config.runtime,
            counters,
            self.searchers.start,
            num_searchers=1,
            tensors={"w": torch.zeros(1000)},
            dtype=torch.float32,
            canary=lambda weights: np.full(64, float(weights.version)),
            prompt_queue=PromptQueue(10, seed=0, shuffle=False),
        )

    def publish(self, *, version: int, value: float) -> None:
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.full((1000,), value))
        self.runtime.publish(make_weights(model, version=version))

    def drain_until(self, condition) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            for group in self.runtime.drain():
                self.groups.append(group.id)
                self.runtime.acknowledge([group.id])
            assert time.monotonic() < deadline, self.groups
            time.sleep(0.01)

    def close(self) -> None:
        self.runtime.stop()
        self.searchers.close()


@pytest.fixture
def run(nodes, tmp_path):
    run = Run(tmp_path / "logs")
    yield run
    run.close()


def test_weights_go_out_groups_come_in_and_a_lost_node_is_replaced(run, nodes):
    node = nodes.add_node(num_cpus=1)
    run.publish(version=0, value=7.0)
    run.runtime.start_searchers(targets.tells_weights, {})
    run.drain_until(lambda: run.groups)
    first = run.groups[0].partition("/")[0]
    assert run.groups == [f"{first}/0-7"]
    run.publish(version=1, value=8.0)
    run.drain_until(lambda: f"{first}/1-8" in run.groups)
    beats = run.runtime.counters.heartbeats()["searcher-0"]
    run.drain_until(lambda: run.runtime.counters.heartbeats()["searcher-0"] > beats)

    nodes.remove_node(node, allow_graceful=False)
    nodes.add_node(num_cpus=1)
    run.publish(version=2, value=9.0)
    run.drain_until(lambda: run.groups[-1].endswith("/2-9") and not run.groups[-1].startswith(first))
    assert (
        run.runtime.counters.metrics()["searchers/replaced"] >= 1.0
    )  # Ray may choose the lost node once more before it misses it


class WaitingHost:
    """A searcher's host that has no weights yet, without its actor: its calls are made here, in any order."""

    def __init__(self, logs, target) -> None:
        from tba.runtime.cluster.roles import RoleHost

        self.buffers = SharedWeights.create({"w": torch.zeros(4)}, torch.float32)
        connection = ConnectionHandle(
            counters=SharedCounters.create().memory.handle, weights=self.buffers.handle(), references=None
        )
        self.host = RoleHost(name="searcher-0", searcher=0, search_path=sys.path, connection=connection)
        arguments = {"index": 0, "incarnation": "a"}
        program = cloudpickle.dumps((target, {}))

        def start() -> None:
            self.host.start(program, arguments, log=logs / "searcher.log", threads=1)
            time.sleep(DEADLINE_SECONDS)  # a process ends with the thread that has started it

        Thread(target=start, daemon=True).start()

    def offer(self) -> None:
        """The first weights arrive."""
        from tba.runtime.cluster.weight_relay import Offer

        offer = Offer(kind="weights", number=1, header=Header(version=0, checksum=0), canary=np.zeros(64))
        self.host.take_weights(offer, [ray.put(np.zeros(data_bytes(self.buffers.layout), np.uint8))])

    def frames_until(self, enough) -> list[bytes]:
        """What the searcher sends until that is enough, or the time is over; it ends then."""
        found: list[bytes] = []
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not enough(found) and time.monotonic() < deadline:
            exchanged = self.host.exchange(SharedCounters.create().values.tobytes(), 0.1)
            found += exchanged.frames
        self.host.signal(signal.SIGKILL)
        return found


@pytest.mark.usefixtures("nodes")
def test_what_a_searcher_is_told_before_its_first_weights_are_there_reaches_it(tmp_path):
    """Such as a request for an evaluation, which the trainer sends as soon as it hears of the searcher."""
    waiting = WaitingHost(tmp_path, targets.tells_what_it_was_told)
    Thread(target=waiting.host.deliver, args=(pickled("an early word"),)).start()
    waiting.offer()
    assert waiting.frames_until(bool) == [pickled("an early word")]


def test_a_cluster_is_not_joined_without_a_token(monkeypatch, tmp_path):
    from tba.runtime.cluster import cluster

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(None, ["runtime.kind=ray", "runtime.address=10.0.0.1:6379"]).runtime
    with pytest.raises(ConfigError, match="joined with a token only"), cluster(config):
        pass


def test_who_has_no_token_cannot_use_the_cluster(nodes):
    code = "import ray, sys; ray.init(address=sys.argv[1]); print(ray.get(ray.remote(lambda: 'ran').remote()))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["RAY_NUM_REDIS_GET_RETRIES"] = "2"  # attempts to reach the cluster, a second apart
    for extra in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}):
        done = subprocess.run(
            [sys.executable, "-c", code, nodes.address],
            env={**environment, **extra},
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        assert done.returncode != 0
        assert "ran" not in done.stdout


@pytest.mark.parametrize(
    ("gpus", "roles", "each"), [(0, 2, 0.0), (1, 2, 0.5), (2, 2, 1.0), (2, 3, 0.5), (3, 8, 1 / 3), (8, 5, 1.0)]
)
def test_roles_share_gpus_where_there_are_too_few(gpus, roles, each):
    from tba.runtime.cluster.roles import share_of_gpus

    assert share_of_gpus(gpus, roles) == pytest.approx(each)
