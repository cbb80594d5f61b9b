"""Runs that meet what happens to runs: a closed pipe, a hang-up, a full disk, a folder that is tidied, a second start."""

import json
import os
import re
import shutil
import signal
import threading

import psutil
import pytest
from commands import Command
from problem import children, command, make_config, steps_of, wait_for

from tba.observe.files import OutputLost
from tba.observe.run_folder import CLAIM, FolderInUse, RunFolder
from tba.run import train
from tba.run.supervise import supervise

pytestmark = pytest.mark.slow

ENDLESS = "train.max_steps=1000000"


def at_step(config, step: int, action) -> threading.Thread:
    """Do something to a run from outside, once it has come so far; the thread ends with the action."""
    thread = threading.Thread(target=lambda: wait_for(lambda: max(steps_of(config), default=0) >= step) and action())
    thread.start()
    return thread


def lose_readers() -> None:
    """Make both streams of this process pipes that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    for stream in (1, 2):
        os.dup2(writing, stream)


def test_closed_output_does_not_end_a_run(folder):
    """`tba train ... 2>&1 | head -1`: both streams lose their reader at the start, and the exit status is 0."""
    settings = ("mode=sync", "observe.progress=true", "evaluate.every=2")
    with Command(command(folder, "closed", *settings), captured=(), prepare=lose_readers) as process:
        assert process.wait(300) == 0
    assert json.loads((folder / "runs" / "closed" / "summary.json").read_text())["steps"] == 6


def test_a_hang_up_saves_and_ends_the_run_that_no_other_process_may_resume(folder):
    config = make_config(folder, "name=hang-up")
    with Command(command(folder, "hang-up", ENDLESS, "mode=sync")) as process:
        assert wait_for(lambda: steps_of(config))
        with pytest.raises(FolderInUse, match=f"in use by process {process.pid} on this host"):
            supervise(config, resume=True, target="never")
        process.send_signal(signal.SIGHUP)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    run = RunFolder(config.run_folder)
    assert run.newest_checkpoint().name == f"step-{json.loads(run.summary.read_text())['steps']}"


def test_a_second_run_in_the_folder_is_refused_and_the_first_goes_on(folder):
    """As with `make quickstart` in two terminals, which replaces the folder."""
    config = make_config(folder, "name=twice-at-once", "mode=sync", "train.max_steps=25", "overwrite=true")
    refused: list[BaseException] = []

    def start_again() -> None:
        with pytest.raises(FolderInUse) as error:
            train(config)
        refused.append(error.value)

    other = at_step(config, 2, start_again)
    assert train(config)["steps"] == 25
    other.join()
    assert f"in use by process {os.getpid()} on this host" in str(refused[0])
    assert steps_of(config) == list(range(1, 26))
    assert not (config.run_folder / CLAIM).exists()
    later = make_config(folder, "name=twice-at-once", "mode=sync", "train.max_steps=2", "overwrite=true")
    assert train(later)["steps"] == 2  # one after the other works


def test_tidying_the_folder_does_not_end_a_run(folder, monkeypatch):
    monkeypatch.setattr("tba.trainer.health.LEAST_EVERY", 3)
    monkeypatch.setattr("tba.observe.recorder.SAMPLES_EVERY", 1)
    config = make_config(
        folder, "name=tidied", "train.max_steps=36", "train.checkpoint_every=5", "evaluate.every=10",
        "train.keep_checkpoints=2",
    )  # fmt: skip
    run = RunFolder(config.run_folder)

    def tidy() -> None:
        shutil.rmtree(run.logs)
        shutil.copytree(run.newest_checkpoint(), run.checkpoints / "step-5.bak")
        shutil.move(run.checkpoints, folder / "moved")
        run.samples.unlink()
        run.metrics.unlink()

    other = at_step(config, 12, tidy)
    assert train(config)["steps"] == 36
    other.join()
    assert run.newest_checkpoint().name == "step-36"
    assert run.samples.read_text()
    assert steps_of(config)[-1] == 36


def test_a_checkpoint_that_cannot_be_written_is_told_once_and_the_run_goes_on(folder, caplog):
    config = make_config(folder, "name=full", "mode=sync", "train.checkpoint_every=2", "evaluate.every=3")
    checkpoints = config.run_folder / "checkpoints"

    def block() -> None:
        shutil.rmtree(checkpoints)
        checkpoints.write_text("no folder")

    blocked = threading.Thread(target=lambda: wait_for(checkpoints.is_dir) and block())
    blocked.start()
    with pytest.raises(OutputLost, match=r"3 of its files could not be written: .*/step-2, .*/step-4, .*/step-6\."):
        train(config)
    blocked.join()
    assert steps_of(config) == [1, 2, 3, 4, 5, 6]
    summary = json.loads(RunFolder(config.run_folder).summary.read_text())
    assert (summary["steps"], summary["outcome"]) == (6, "failed")
    assert summary["error"].startswith("OutputLost: training is done, but 3 of its files could not be written")
    told = [record for record in caplog.records if record.getMessage().startswith("checkpoint /")]
    assert [record.levelname for record in told] == ["ERROR"]
    assert re.search(r"checkpoint .*/full/checkpoints/step-2 cannot be written", caplog.text)


@pytest.fixture
def heeds_interrupts():
    """This process may run in the background of a script, where Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupted_run_names_the_checkpoint_that_it_could_not_write(folder, caplog):
    """Also where an earlier one was told: it said that it would not be said again."""
    config = make_config(folder, "name=full-and-interrupted", "mode=sync", ENDLESS, "train.checkpoint_every=5")
    checkpoints = config.run_folder / "checkpoints"

    def block_and_interrupt() -> None:
        shutil.rmtree(checkpoints)
        checkpoints.write_text("no folder")
        wait_for(lambda: "cannot be written" in caplog.text)
        os.kill(os.getpid(), signal.SIGINT)

    other = at_step(config, 1, block_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    other.join()
    last = steps_of(config)[-1]
    assert re.search(rf"of its files could not be written: .*checkpoints/step-{last}\.$", caplog.messages[-1])


def test_what_a_reward_started_does_not_outlive_a_run(folder):
    (folder / "starts.py").write_text(
        "import subprocess\n"
        "def starts(completions, **columns):\n"
        "    subprocess.Popen(['sleep', '987'], start_new_session=True)\n"
        "    return [float(len(text) % 2) for text in completions]\n"
    )
    config = make_config(folder, "name=starts", "train.max_steps=2")
    reward = config.task.rewards[0].model_copy(update={"function": f"{folder}/starts.py:starts"})
    config = config.model_copy(update={"task": config.task.model_copy(update={"rewards": (reward,)})})
    assert train(config)["steps"] == 2
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987"]]
    assert not children()
