"""`tba train runtime.kind=ray`: the same run on a Ray cluster, through the deaths of its roles."""

import json
import os
import signal
import sqlite3
import subprocess
from contextlib import ExitStack
from importlib.util import find_spec

import psutil
import pytest
from commands import heed_signals
from problem import command, make_config, steps_of, wait_for
from test_supervision import role

from tba.observe.run_folder import RunFolder

# Not imported: it would keep for all tests of this process that there is no token.
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra `ray` is not installed")


def test_a_run_on_a_private_cluster_survives_its_searcher_and_its_trainer(folder):
    """Nothing that was stored is lost or stored twice, every step is recorded once, Ctrl-C saves, nothing is left of the
    cluster, and while it lived it listened on loopback only."""
    settings = ("train.max_steps=1000000", "train.checkpoint_every=20", "runtime.kind=ray")
    config = make_config(folder, "name=ray", *settings)
    run = RunFolder(config.run_folder)

    def restarts(of: str) -> float:
        # A trainer that died before its first checkpoint was whole begins anew, and so does the file.
        lines = run.metrics.read_text().rpartition("\n")[0].splitlines()
        return json.loads(lines[-1]).get(of, 0.0) if lines else 0.0

    with (
        subprocess.Popen(
            command(folder, "ray", *settings), stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
        ) as process,
        ExitStack() as closing,
    ):
        closing.callback(process.kill)  # or a failure below would wait for the end of an endless run
        assert wait_for(lambda: max(steps_of(config), default=0) >= 20 and role(run, "searcher-0"), 300)
        started = psutil.Process(process.pid).children(recursive=True)
        listening = [c for p in started for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {c.laddr.ip.removeprefix("::ffff:") for c in listening} == {"127.0.0.1"}
        os.kill(role(run, "searcher-0")["pid"], signal.SIGKILL)
        assert wait_for(lambda: restarts("searchers/replaced") == 1)
        os.kill(role(run, "trainer")["pid"], signal.SIGKILL)
        assert wait_for(lambda: restarts("trainer/restarts") == 1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    summary = json.loads(run.summary.read_text())
    assert summary["outcome"] == "interrupted"
    assert run.newest_checkpoint().name == f"step-{summary['steps']}"
    assert steps_of(config) == list(range(1, summary["steps"] + 1))
    with sqlite3.connect(run.replay) as database:
        ids = database.execute("SELECT incarnation, number FROM groups").fetchall()
    assert len(ids) == len(set(ids)) >= summary["steps"]
    assert wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in started))
