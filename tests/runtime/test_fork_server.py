"""Roles as forks of one process that has imported everything."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import targets

from tba.runtime import processes
from tba.runtime.processes import ForkServer, RoleProcess, module_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="roles are forked on Linux only")


def test_a_fork_has_its_callers_descriptors_folder_and_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TBA_TEST_SETTING", "as the caller has it now")
    reading, writing = os.pipe()
    os.write(writing, b"through an inherited pipe")
    log = tmp_path / "role.log"
    process = RoleProcess(
        "searcher-7", targets.surroundings, {"descriptor": reading}, log=log, fds=(reading,), forked=True
    )
    found = process.link.receive(timeout_seconds=60.0)
    assert found == (b"through an inherited pipe", str(tmp_path), "as the caller has it now", "searcher-7")
    assert process.wait(60.0)
    os.close(reading)
    os.close(writing)


def test_modules_of_the_working_folder_do_not_stand_for_pythons_own(tmp_path):
    (tmp_path / "types.py").write_text("raise RuntimeError('mine')\n")
    command = module_command("tba.runtime.role_process", "not a socket")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "ValueError: invalid literal for int() with base 10: 'not a socket'" in done.stderr


def test_the_log_of_a_fork_is_named_from_its_callers_folder_wherever_that_was_before(tmp_path, monkeypatch):
    """As in a script that changes its folder between two trainings."""
    RoleProcess("before", targets.deaf, {}, log=tmp_path / "before.log", forked=True).kill()
    monkeypatch.chdir(tmp_path)
    process = RoleProcess("later", targets.echo, {"prefix": ""}, log=Path("later.log"), forked=True)
    process.link.send("alive")
    assert process.link.receive(timeout_seconds=60.0) == "alive"
    process.kill()
    assert (tmp_path / "later.log").exists()


def test_roles_end_with_their_server_and_a_new_one_takes_its_place(tmp_path):
    first = RoleProcess("first", targets.deaf, {}, log=tmp_path / "first.log", forked=True)
    psutil.Process(first.pid).parent().kill()
    assert first.wait(60.0)
    assert not first.alive
    second = RoleProcess("second", targets.echo, {"prefix": ""}, log=tmp_path / "second.log", forked=True)
    second.link.send("alive")
    assert second.link.receive(timeout_seconds=60.0) == "alive"
    second.kill()
    assert not second.alive


def test_a_server_that_hangs_is_replaced_and_its_roles_end_with_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(processes, "START_SECONDS", 1)
    monkeypatch.setattr(ForkServer, "_shared", None)  # it is the shared one again in the end
    monkeypatch.setattr(processes, "ROLE_MODULES", ())  # these roles need no torch
    killed, goes_on = (
        RoleProcess(name, targets.echo, {"prefix": ""}, log=tmp_path / name, forked=True) for name in ("killed", "on")
    )
    server = psutil.Process(killed.pid).parent()
    server.suspend()
    killed.kill()
    assert (killed.status, goes_on.status) == (-signal.SIGKILL, None), "seen although nobody tells"
    later = RoleProcess("later", targets.echo, {"prefix": ""}, log=tmp_path / "later", forked=True)
    assert f"(process {server.pid}) has not answered for 1 s. Another one takes its place." in caplog.text
    assert goes_on.wait(60.0)
    later.link.send("alive")
    assert later.link.receive(timeout_seconds=60.0) == "alive"
    later.kill()
    assert later.status == -signal.SIGKILL
    ForkServer._shared.close()


def test_roles_are_forked_where_few_files_may_be_open():
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import targets
from tba.runtime import processes
processes.ROLE_MODULES = ()  # these roles need no torch
role = processes.RoleProcess("role", targets.echo, {"prefix": "is "}, log=None, forked=True)
role.link.send("alive")
print(role.link.receive(timeout_seconds=60.0))
"""
    folder = Path(targets.__file__).parent
    found = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == ("is alive\n", "")


def test_one_server_serves_all_runs_of_a_process(tmp_path):
    before = ForkServer._shared
    roles = [RoleProcess("role", targets.deaf, {}, log=tmp_path / "role.log", forked=True) for _ in range(2)]
    parents = {psutil.Process(role.pid).ppid() for role in roles}
    for role in roles:
        role.kill()
    assert len(parents) == 1
    assert before is None or before is ForkServer._shared


def test_a_role_that_starts_roles_has_a_server_of_its_own_that_ends_with_it(tmp_path):
    role = RoleProcess("above", targets.starts_a_role, {}, log=tmp_path / "role.log", forked=True, starts_roles=True)
    had, passed_on, pid, below, server = role.link.receive(timeout_seconds=60.0)
    assert (had, passed_on, pid) == (True, [], role.pid)
    processes = [psutil.Process(number) for number in (below, server)]
    assert processes[1].ppid() == role.pid
    ours = psutil.Process(psutil.Process(role.pid).ppid())
    assert processes[1].cmdline() == ours.cmdline(), "a fork of this one's, which imports nothing again"
    role.kill()
    assert psutil.wait_procs(processes, timeout=60.0)[1] == []
