"""Roles on a Ray cluster: searchers get the trainer's weights, their groups arrive, and one whose node is gone is replaced.
The cluster is real: several nodes on loopback, with a token."""

import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest
import targets
import torch

from tba.config import ConfigError, RuntimeConfig, load_config
from tba.models.weights import make_weights
from tba.observe.claim import Holder
from tba.observe.files import RunFolder
from tba.runtime.board import Board
from tba.runtime.leases import VisitLedger
from tba.runtime.links import EndsHandle, Link, RelayedLink, frame, pickled, split_frame
from tba.runtime.local import LocalRuntime
from tba.runtime.seats import Host, HostHandle
from tba.runtime.slot_memory import Header, data_bytes
from tba.runtime.supervisor import Supervisor
from tba.runtime.weight_slots import WeightSlots

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


class Run:
    """A trainer in this process, with its supervisor in a thread and its searchers on the cluster."""

    def __init__(self, logs) -> None:
        from tba.runtime.cluster.roles import ClusterRoles

        config, board = RuntimeConfig(stop_seconds=5.0, kind="ray"), Board.create()
        self.roles = ClusterRoles(config, board, logs=logs, gpus_each=0.0)
        self.supervisor = Supervisor(config, board, logs=logs, start_searcher=self.roles.searcher)
        self.groups: list[str] = []
        self.thread = threading.Thread(target=self.supervisor.run)
        self.thread.start()
        self.runtime = LocalRuntime(
            config,
            Host(link=Link(self.supervisor.trainer_connection), board=board, owner=Holder.of_this_process()),
            num_searchers=1,
            tensors={"w": torch.zeros(1000)},
            dtype=torch.float32,
            canary=lambda weights: np.full(64, float(weights.version)),
            ledger=VisitLedger(10, seed=0, shuffle=False),
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
        self.thread.join()
        self.supervisor.close()
        self.roles.close()


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
    beats = run.runtime.heartbeats()["searcher-0"]
    run.drain_until(lambda: run.runtime.heartbeats()["searcher-0"] > beats)

    nodes.remove_node(node, allow_graceful=False)
    nodes.add_node(num_cpus=1)
    run.publish(version=2, value=9.0)
    run.drain_until(lambda: run.groups[-1].endswith("/2-9") and not run.groups[-1].startswith(first))
    assert (
        run.runtime.metrics()["searchers/replaced"] >= 1.0
    )  # Ray may choose the lost node once more before it misses it


@pytest.mark.usefixtures("nodes")
def test_what_a_searcher_is_told_before_its_first_weights_are_there_reaches_it(tmp_path):
    """Such as a request for an evaluation, which the trainer sends as soon as it hears of the searcher."""
    from tba.runtime.cluster.host import RoleHost
    from tba.runtime.cluster.weights import Offer

    slots = WeightSlots.create({"w": torch.zeros(4)}, torch.float32)
    ends = EndsHandle(board=Board.create().memory.handle(), weights=slots.handle(), references=None)
    host = RoleHost(name="searcher-0", searcher=0, search_path=sys.path)
    recipe = cloudpickle.dumps((targets.tells_what_it_was_told, {}))
    arguments = {"index": 0, "incarnation": "a", "ends": pickled(ends)}
    host.start(recipe, arguments, trainer="first", log=str(tmp_path / "searcher.log"), threads=1)
    host.deliver([frame("", pickled("an early word"))])
    offer = Offer(trainer="first", kind="weights", number=1, header=Header(version=0, checksum=0), canary=None)
    assert host.take_weights(offer, [ray.put(np.zeros(data_bytes(slots.layout), np.uint8))])
    found: list[bytes] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not found and time.monotonic() < deadline:
        found = host.exchange(Board.create().values.tobytes(), 0.1).frames
    host.signal(signal.SIGKILL)
    assert [split_frame(each) for each in found] == [("trainer", pickled("an early word"))]


def test_a_trainer_lacks_groups_until_one_on_its_node_has_said_that_they_are_stored(nodes, tmp_path):
    """One that is killed while it gets them leaves a part, and the next one on this node must get them again."""
    from tba.runtime.cluster.copies import RunCopy
    from tba.runtime.cluster.roles import ClusterRoles

    node, board = nodes.add_node(num_cpus=4), Board.create()  # other tests leave nodes with one
    copy = RunCopy(RunFolder.create(tmp_path / "run.replica", overwrite=False))
    roles = ClusterRoles(
        RuntimeConfig(kind="ray", trainer_cpus=4), board, logs=tmp_path / "logs", gpus_each=0.0, copy=copy
    )
    host = HostHandle(board=board.memory.handle(), owner=Holder.of_this_process())
    config = load_config(None, [f"output={tmp_path}", "name=run"])
    lacking = []
    for stored in (False, True, True):
        arguments = {"config": config, "resume": False, "host": host}
        role = roles.trainer("targets:waits", arguments, lambda ours: RelayedLink(ours, deliver=lambda *event: None))
        deadline = time.monotonic() + DEADLINE_SECONDS
        while role.pid == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        lacking.append(role.lacks_groups)
        if stored:
            role.lacks_groups = False
        role.kill()
    nodes.remove_node(node, allow_graceful=False)
    assert lacking == [True, True, False]


def test_a_cluster_is_not_joined_without_a_token(monkeypatch, tmp_path):
    from tba.runtime.cluster.connect import cluster

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
