"""`replay.durability=node`: the node of the trainer is lost with its disk, and the run goes on, on another node. The cluster
is real: several nodes on one machine. All of them see one disk here, so the test deletes what was on the trainer's."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commands import heed_signals
from problem import command, make_config, steps_of, wait_for
from test_supervision import role

from tba.config import ConfigError
from tba.observe.run_folder import RunFolder
from tba.run.start import train
from tba.runtime.replica import GROUPS, Replica, replica_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from chaos_bench.accounting import account, read_notes, read_rows

pytestmark = pytest.mark.slow

# Ray reads them when it is imported. A lost node is missed sooner than after 15 s.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"RAY_health_check_period_ms": "500"}
pytest.importorskip("ray", reason="the extra `ray` is not installed")


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """A head without room for roles, and two nodes with room for one each."""
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv("TBA_ACKNOWLEDGED_LOG", str(tmp_path / "notes"))  # every process of the cluster inherits it
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def node_of(nodes, process: psutil.Process):
    ancestors = {parent.pid for parent in process.parents()}
    return next(node for node in nodes.worker_nodes if any(p.pid in ancestors for _, p in node.live_processes()))


def test_the_trainers_node_is_lost_with_its_disk_and_nothing_that_was_acknowledged_is(folder, nodes, tmp_path):
    settings = (
        *("train.max_steps=1000000", "train.checkpoint_every=10", "replay.durability=node"),
        *("runtime.kind=ray", f"runtime.address={nodes.address}"),
    )
    config = make_config(folder, "name=node", *settings)
    run, replica = RunFolder(config.run_folder), RunFolder(replica_folder(config.run_folder))
    with subprocess.Popen(
        command(folder, "node", *settings), stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
    ) as process:
        assert wait_for(lambda: replica.checkpoints_by_step() and role(replica, "trainer"), 300)
        trainer = psutil.Process(role(replica, "trainer")["pid"])
        noted = len(read_notes(tmp_path / "notes"))
        assert wait_for(lambda: len(read_notes(tmp_path / "notes")) > noted)
        nodes.remove_node(node_of(nodes, trainer), allow_graceful=False)
        assert wait_for(lambda: not trainer.is_running())
        shutil.rmtree(run.path)
        copied = len(replica.metrics.read_text().splitlines())  # the next trainer gets them, and cuts off some
        nodes.add_node(num_cpus=1)
        assert wait_for(lambda: max(steps_of(config), default=0) > copied + 10, 300)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "gets the copy" in errors
    summary = json.loads(run.summary.read_text())
    assert summary["outcome"] == "interrupted"
    assert steps_of(config) == list(range(1, summary["steps"] + 1))
    found = account(read_notes(tmp_path / "notes"), *read_rows(run.replay))
    assert found.acknowledged > noted
    assert (found.lost, found.changed, found.twice) == ([], [], [])
    # The copy has followed to the end, with every group.
    assert replica.newest_checkpoint().name == f"step-{summary['steps']}" == run.newest_checkpoint().name
    second = Replica(replica.path / GROUPS, capacity=config.replay.capacity)
    assert {note.id for note in read_notes(tmp_path / "notes")} <= set(second.ids())
    second.close()
    assert not os.path.exists(replica.path / ".claim.json")


def test_a_trainer_in_the_process_of_the_caller_has_no_second_node(folder):
    config = make_config(folder, "name=here", "replay.durability=node", "runtime.kind=ray", "runtime.address=auto")
    with pytest.raises(ConfigError, match="start the run with `tba train`"):
        train(config)
    assert not config.run_folder.exists()
