"""What a role was doing when nobody could say: stacks in the logs, on demand."""

import os
import subprocess
import sys

import pytest
import targets
from problem import wait_for

from tba.runtime.deadlines import dump_stacks, stacks_to
from tba.runtime.processes import RoleProcess


@pytest.mark.parametrize("forked", [False, True])
def test_a_role_writes_the_stacks_of_all_threads_to_its_log_and_goes_on(tmp_path, forked):
    log = tmp_path / "role.log"
    process = RoleProcess("role", targets.echo, {"prefix": "re: "}, log=log, forked=forked)
    process.link.send("one")
    assert process.link.receive(timeout_seconds=60.0) == "re: one"
    assert dump_stacks([process.pid]) == [process.pid]
    assert wait_for(lambda: "in echo" in log.read_text())
    assert "link-reader" in log.read_text() or log.read_text().count("hread 0x") >= 2
    process.link.send("two")
    assert process.link.receive(timeout_seconds=60.0) == "re: two"
    process.kill()


def test_a_role_that_is_stuck_in_c_code_does_so_too(tmp_path):
    log = tmp_path / "role.log"
    process = RoleProcess("role", targets.stuck, {}, log=log)
    assert process.link.receive(timeout_seconds=60.0) == "stuck"
    assert dump_stacks([process.pid]) == [process.pid]
    assert wait_for(lambda: "in stuck" in log.read_text())
    assert process.alive
    process.kill()


def test_a_process_that_does_not_heed_the_signal_is_not_ended_by_it():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert dump_stacks([other.pid, 2**22 - 1]) == []
        other.communicate(b"\n", timeout=60)
    assert other.returncode == 0


def test_the_trainer_writes_its_stacks_to_its_log_while_it_trains(tmp_path):
    log = tmp_path / "logs" / "trainer.log"
    with stacks_to(log):
        assert dump_stacks([os.getpid()]) == [os.getpid()]
        assert wait_for(lambda: "test_the_trainer_writes_its_stacks" in log.read_text())
    assert dump_stacks([os.getpid()]) == []
