"""Child processes: they answer, they are noticed when they die, they never outlive their parent."""

import os
import time
from pathlib import Path

import pytest
import targets

from tba.runtime.links import Failed
from tba.runtime.processes import RoleProcess, last_lines, stop_all

DEADLINE_SECONDS = 60.0


@pytest.fixture(params=[False, True], ids=["new", "forked"])
def start(request):
    """Both ways of starting a process keep the same promises."""

    def start(target, tmp_path: Path, **arguments) -> RoleProcess:
        return RoleProcess("role", target, arguments, log=tmp_path / "role.log", forked=request.param)

    return start


def eventually(condition) -> bool:
    """Poll with a deadline: how soon a process ends is the system's business."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_messages_go_both_ways_and_the_process_ends(start, tmp_path):
    process = start(targets.echo, tmp_path, prefix="got ")
    process.link.send("one")
    process.link.send("two")
    assert process.link.receive(timeout_seconds=DEADLINE_SECONDS) == "got one"
    assert process.link.receive(timeout_seconds=DEADLINE_SECONDS) == "got two"
    process.link.send("end")
    assert process.wait(DEADLINE_SECONDS)


def test_a_process_that_fails_leaves_its_traceback_in_the_log(start, tmp_path):
    process = start(targets.fail, tmp_path)
    assert process.wait(DEADLINE_SECONDS)
    assert process.status == 1
    assert "Traceback" in last_lines(process.log)
    assert "this target always fails" in last_lines(process.log)


def test_a_failing_process_tells_its_parent_before_it_ends(start, tmp_path):
    process = start(targets.fail, tmp_path)
    message = process.link.receive(timeout_seconds=DEADLINE_SECONDS)
    assert message == Failed(error="ValueError: this target always fails")
    process.wait(DEADLINE_SECONDS)


def test_a_message_that_cannot_be_read_is_told_as_a_failure_and_does_not_deafen_the_link(start, tmp_path):
    process = start(targets.sends_unreadable, tmp_path)
    one, unreadable, two = (process.link.receive(timeout_seconds=DEADLINE_SECONDS) for _ in range(3))
    process.kill()
    assert (one, two) == ("one", "two")
    assert isinstance(unreadable, Failed)
    assert 'a message that cannot be read: ValueError("invalid literal' in unreadable.error


def test_a_message_that_cannot_be_sent_ends_its_sender_with_its_name(start, tmp_path):
    process = start(targets.sends_unsendable, tmp_path)
    message = process.link.receive(timeout_seconds=DEADLINE_SECONDS)
    assert message == Failed(error="TypeError: a message Unsendable cannot be sent: RuntimeError: not this one")
    process.wait(DEADLINE_SECONDS)


def test_a_killed_process_is_noticed(start, tmp_path):
    process = start(targets.deaf, tmp_path)
    assert process.alive
    process.kill()
    assert process.status == -9
    assert eventually(lambda: not process.alive and process.link.closed)


def test_a_process_that_does_not_listen_is_killed(start, tmp_path):
    process = start(targets.deaf, tmp_path)
    stop_all([process], "stop", timeout_seconds=0.1)
    assert not process.alive


def test_a_child_does_not_outlive_its_parent(start, tmp_path):
    parent = start(targets.parent_with_child, tmp_path, log=str(tmp_path / "grandchild.log"))
    grandchild = parent.link.receive(timeout_seconds=DEADLINE_SECONDS)
    assert isinstance(grandchild, int)
    assert parent.wait(DEADLINE_SECONDS)
    assert eventually(lambda: not exists(grandchild))
    assert grandchild != os.getpid()


def test_a_child_stuck_in_c_code_does_not_outlive_its_parent(start, tmp_path):
    """A catastrophic regular expression lets no other Python thread run: a typical hanging reward."""
    log = str(tmp_path / "grandchild.log")
    parent = start(targets.parent_with_child, tmp_path, log=log, child=targets.stuck)
    grandchild = parent.link.receive(timeout_seconds=DEADLINE_SECONDS)
    assert parent.wait(DEADLINE_SECONDS)
    assert eventually(lambda: not exists(grandchild))


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_pinned(tmp_path, threads, forked):
    """Those of a fork too, whatever the process that it is forked from has."""
    process = RoleProcess("role", targets.thread_setting, {}, log=tmp_path / "role.log", threads=threads, forked=forked)
    assert process.link.receive(timeout_seconds=DEADLINE_SECONDS) == (str(threads), threads, threads)
    process.wait(DEADLINE_SECONDS)
