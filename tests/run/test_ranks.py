"""`train.ranks`: a run whose trainer is several processes, through the death of one of them, and under torchrun."""

import os
import signal

import psutil
import pytest
import torch.distributed as dist
from commands import Command, become_python, heed_signals, run_python
from problem import command, make_config, steps_of, wait_for

import tba.__main__
from tba.config import ConfigError
from tba.observe.files import read_summary
from tba.observe.run_folder import RunFolder
from tba.run.start import train
from tba.run.torchrun import Torchrun, with_torchrun
from tba.runtime.role_process import OWN_SERVER

pytestmark = pytest.mark.slow

RANKS = ("train.ranks=2", "train.checkpoint_every=3")


def test_a_run_over_two_ranks_survives_the_loss_of_one_and_goes_on_with_one(folder):
    config = make_config(folder, "name=ranks", "train.max_steps=15", *RANKS)
    with Command(command(folder, "ranks", "train.max_steps=15", *RANKS)) as process:
        assert wait_for(lambda: max(steps_of(config), default=0) >= 4, 300)
        started = psutil.Process(process.pid).children(recursive=True)
        rank = next(p for p in started if p.name() == "trainer-rank-1")
        listening = [c for p in started for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        rank.kill()
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert f"trainer-rank-1 (process {rank.pid}) has ended with status -9" in errors
    assert "it is resumed" in errors
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
    assert steps_of(config) == list(range(1, 16))
    resumed = make_config(folder, "name=ranks", "train.max_steps=16", "train.ranks=1", "train.checkpoint_every=3")
    summary = train(resumed, resume=True)
    assert (summary["outcome"], summary["steps"]) == ("finished", 16)


def test_trainings_in_one_process_leave_its_environment_alone_and_want_torch_distributed_for_themselves(
    folder, monkeypatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # a user's own, of no use here
    for name in ("first", "second"):
        assert train(make_config(folder, f"name={name}", "train.max_steps=2", "train.ranks=2"))["steps"] == 2
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"train\.ranks=2 needs torch\.distributed for itself"):
            train(make_config(folder, "name=third", "train.max_steps=2", "train.ranks=2"))
    finally:
        dist.destroy_process_group()


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_torchrun_starts_the_ranks(folder):
    """As forks of torchrun's process, which has imported torch: the next test starts them as new processes. On the CPU, for
    torchrun looks for GPUs, which do not survive a fork."""
    config = make_config(folder, "name=torchrun")
    one = command(folder, "torchrun", "train.max_steps=3", "model.device=cpu")
    done = run_python(*TORCHRUN, "--start-method=fork", "--run-path", tba.__main__.__file__, *one[3:])
    assert done.returncode == 0, done.stderr
    assert steps_of(config) == [1, 2, 3]
    assert "ranks: 2" in RunFolder(config.run_folder).config.read_text()


def start_as_torchrun() -> None:
    """In the process that becomes torchrun, which has imported torch already. Those that it starts import it for themselves:
    it hands no descriptor on, also not that of a process to fork roles from."""
    heed_signals()
    del os.environ[OWN_SERVER]


def test_a_run_under_torchrun_that_is_interrupted_saves_before_its_ranks_end(folder):
    config, one = make_config(folder, "name=interrupted"), command(folder, "interrupted", "train.max_steps=10000")
    with Command([*TORCHRUN, *one[1:]], target=become_python, prepare=start_as_torchrun) as process:
        assert wait_for(lambda: max(steps_of(config), default=0) >= 2, 300)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert "stopped at step" in errors
    found = RunFolder(config.run_folder)
    assert "ranks: 2" in found.config.read_text()
    assert list(found.checkpoints_by_step()) == [max(steps_of(config))], errors
    assert read_summary(found)["outcome"] == "interrupted"


def test_the_number_of_ranks_is_torchruns_or_the_configs(folder):
    environment = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    started = Torchrun.found(environment | {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500"})
    assert started == Torchrun(rank=1, size=4, local_rank=1, address=("10.0.0.5", 29500))
    assert Torchrun.found({"RANK": "1", "WORLD_SIZE": "4"}) is None  # of something else that was started so
    for wrong, message in (
        ("one", "RANK='one' is no number"),
        ("", "RANK='' is no number: start the command by torchrun"),
    ):
        with pytest.raises(ConfigError, match=message):
            Torchrun.found(environment | {"RANK": wrong, "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500"})
    assert with_torchrun(make_config(folder), started).train.ranks == 4
    assert started.device(make_config(folder, "model.device=cpu")) == "cpu"  # also where there are GPUs
    with pytest.raises(ConfigError, match=r"train\.ranks=3, but torchrun has started 4 processes"):
        with_torchrun(make_config(folder, "train.ranks=3"), started)
    with pytest.raises(ConfigError, match=r"train\.ranks=2 needs mode=async"):
        make_config(folder, "train.ranks=2", "mode=sync")
