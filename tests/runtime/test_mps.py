"""The MPS daemon is started only where it helps; everywhere else a reason is given."""

import os

import pytest

from tba.config import load_config
from tba.runtime.placement import PIPES, PRIORITY, lower_mps_priority, start_mps, why_no_mps


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["runtime.mps=off"], "runtime.mps=off"),
        (["mode=sync"], "in sync mode one process uses the GPU"),
        (["model.device=cpu"], "no NVIDIA GPU to share"),
    ],
)
def test_a_reason_is_given_where_there_is_no_daemon(overrides, reason):
    assert reason in why_no_mps(load_config(None, overrides))


def test_roles_that_have_a_gpu_each_need_no_daemon(monkeypatch):
    monkeypatch.setattr("tba.runtime.placement.sees_gpu", lambda: True)
    apart = ("model.device=cuda:0", "search.devices=cuda:1")
    assert why_no_mps(load_config(None, [*apart])) == "every role has a GPU of its own"
    assert why_no_mps(load_config(None, [*apart, "search.num_searchers=2"])) != "every role has a GPU of its own"


def test_a_daemon_of_the_users_own_is_left_alone(monkeypatch):
    monkeypatch.setenv(PIPES, "/somewhere")
    monkeypatch.setattr("tba.runtime.placement.sees_gpu", lambda: True)
    assert "that daemon is used" in why_no_mps(load_config(None, []))


def test_asking_for_it_where_it_cannot_be_is_an_error():
    with pytest.raises(RuntimeError, match=r"runtime\.mps=on, but there is no NVIDIA GPU"):
        start_mps(load_config(None, ["runtime.mps=on", "model.device=cpu"]))
    assert not start_mps(load_config(None, ["model.device=cpu"]))


def test_a_trainer_gives_way_to_searchers_that_share_its_gpu_through_a_daemon(monkeypatch):
    apart = ("model.device=cuda:0", "search.devices=cuda:1")
    monkeypatch.setenv(PRIORITY, "")  # so that what is set below does not outlive this test
    monkeypatch.delenv(PRIORITY)
    monkeypatch.delenv(PIPES, raising=False)
    lower_mps_priority(load_config(None, ["model.device=cuda"]))  # there is no daemon
    monkeypatch.setenv(PIPES, "/somewhere")
    lower_mps_priority(load_config(None, ["model.device=cuda", "mode=sync"]))
    lower_mps_priority(load_config(None, [*apart]))
    assert PRIORITY not in os.environ
    lower_mps_priority(load_config(None, ["model.device=cuda"]))
    assert os.environ[PRIORITY] == "1"
    monkeypatch.setenv(PRIORITY, "0")  # a user's own word is kept
    lower_mps_priority(load_config(None, ["model.device=cuda"]))
    assert os.environ[PRIORITY] == "0"
