"""Claims: one holder per run; the dead do not hold."""

import json
import os
import subprocess
import sys

import pytest
from studies import plan_study, run_study

from tba.compare.runs import Claims, process_started, read_holder, state_of

pytestmark = pytest.mark.slow


def write_claim(path, *, pid: int, process_started: int | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pid": pid, "process_started": process_started, "time": 0.0}))


@pytest.fixture(scope="module")
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_of_two_holders_in_one_process_one_gets_the_run(tmp_path):
    first, second = Claims(tmp_path / "lock"), Claims(tmp_path / "lock")
    claim = tmp_path / "runs" / "seed-0.claim.json"
    assert first.take(claim)
    assert not second.take(claim)
    assert not first.take(claim)
    assert read_holder(claim) == os.getpid()
    first.release(claim)
    assert second.take(claim)


def test_the_claim_of_a_process_that_is_gone_is_taken_over(tmp_path, dead_pid):
    claim = tmp_path / "claim.json"
    write_claim(claim, pid=dead_pid, process_started=1)
    assert read_holder(claim) is None
    assert Claims(tmp_path / "lock").take(claim)
    assert json.loads(claim.read_text())["pid"] == os.getpid()


def test_a_process_id_used_again_is_not_the_holder(tmp_path):
    started = process_started(os.getpid())
    write_claim(tmp_path / "claim.json", pid=os.getpid(), process_started=started - 1)
    assert read_holder(tmp_path / "claim.json") is None
    write_claim(tmp_path / "claim.json", pid=os.getpid(), process_started=started)
    assert read_holder(tmp_path / "claim.json") == os.getpid()


def test_a_process_that_ended_but_was_not_waited_for_is_gone():
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()  # its end closes the pipe
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_started(process.pid) is None
    process.wait()
    process.stdout.close()


def test_a_study_leaves_claimed_runs_alone_and_says_for_which_it_waited(tmp_path, dead_pid):
    changes = {"rows": {"only": {}}, "columns": {"1": {}}}
    first, second = plan_study(tmp_path, **changes).runs["only", None]
    write_claim(first.claim, pid=os.getpid(), process_started=process_started(os.getpid()))
    write_claim(second.claim, pid=dead_pid, process_started=1)
    with pytest.raises(RuntimeError, match=rf"waited 0 s .*: runs/only/1/seed-0 \(process {os.getpid()}\)\."):
        run_study(tmp_path, changes=changes, wait_seconds=0)
    assert not first.folder.exists()
    assert (state_of(first), state_of(second)) == ("claimed", "done")
    assert not second.claim.exists()
