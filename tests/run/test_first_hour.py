"""What a user sees: while a run starts and goes on, after Ctrl-C, at its end, and where nothing can be learned."""

import json
import re
import shlex
import sys

import pytest
from problem import command, make_config, wait_for
from terminal import Terminal

from tba.cli import app
from tba.cli.training import free_name, given_config, name_to_resume
from tba.config import ConfigError
from tba.observe.run_folder import RunFolder
from tba.run import train

pytestmark = pytest.mark.slow

ENDLESS = "train.max_steps=100000"
SHOWN = "observe.progress=true"


def steps_shown(terminal: Terminal) -> int:
    return max(map(int, re.findall(r"step (\d+) of 100000", terminal.written)), default=0)


def test_ctrl_c_in_a_terminal_says_where_the_run_stopped_what_was_saved_and_how_to_go_on(folder):
    with Terminal(command(folder, "pressed", ENDLESS, SHOWN)) as terminal:
        assert wait_for(lambda: steps_shown(terminal) > 3), terminal.screen
        assert wait_for(lambda: "left" in terminal.written), "an estimate comes with the first steps"
        terminal.typed("\x03")
        assert terminal.wait() == 130
        assert wait_for(lambda: "--resume" in terminal.screen), terminal.screen
    screen, run = terminal.screen, folder / "runs" / "pressed"
    step = int(re.search(r"stopped at step (\d+) of 100000, after \d+ s\.", screen)[1])
    assert step > 3
    assert f"Saved: {run}/checkpoints/step-{step}." in screen
    assert "│" not in screen, "nothing is left of the table"
    assert re.search(r"waits for the first batch: \d of 4 prompts", terminal.written), "before the first step"
    before = re.split(r"step [1-9]\d* of", terminal.written)[0]  # a busy machine may never show step 1
    assert not re.search(r"reward +│ +0\.000", before), "nothing was measured yet"

    go_on = shlex.split(re.search(r"Go on: tba (.*)", screen)[1])
    with Terminal([sys.executable, "-m", "tba", *go_on]) as terminal:
        assert wait_for(lambda: f"goes on from step {step} of 100000" in terminal.screen), terminal.screen
        assert wait_for(lambda: steps_shown(terminal) > step), terminal.screen
        terminal.typed("\x03")
        assert terminal.wait() == 130


def test_a_dumb_terminal_gets_lines_and_a_run_of_which_nothing_was_learned_says_so(folder):
    arguments = command(folder, "unrewarded", SHOWN, "mode=sync", "train.max_steps=5", reward="always_zero")
    with Terminal(arguments, kind="dumb") as terminal:
        assert terminal.wait() == 0, terminal.screen
        assert wait_for(lambda: "best weights" in terminal.screen)
    assert "so far no response was rewarded: 64 responses, all 0.0. Look at samples.jsonl" in terminal.screen
    assert "\x1b" not in terminal.written
    assert not re.search("[│┃┏┌]", terminal.screen)


def test_a_run_closes_with_where_it_is_its_results_its_time_its_best_weights_and_its_plot(folder, capfd):
    config = make_config(folder, "name=shown", SHOWN, "mode=sync", "evaluate.every=2", "train.max_steps=4")
    summary = train(config)
    printed = capfd.readouterr()
    lines, run = printed.out.splitlines(), config.run_folder
    assert lines[0].startswith(f"{run} has finished")
    assert lines[1].split()[0] == "start"
    assert "final (step 4" in lines[1]
    row = next(line for line in lines if line.startswith("reward "))
    assert row.count("±") == 2 + (0 < summary["best"]["step"] < 4)
    assert any(re.match(r"4 steps in \d+ s of training, \d+ s with loading", line) for line in lines)
    assert f"best weights: tba evaluate {run}/checkpoints/best-step-{summary['best']['step']}" in printed.out
    assert lines[-1] == f"plot: {run}/evaluations.png"
    assert (run / "evaluations.png").read_bytes().startswith(b"\x89PNG")
    assert "evaluation of the start model: reward" in printed.err
    assert summary["elapsed_seconds"] >= summary["seconds"]
    assert summary["no_signal"] is None


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("always_zero", "no response was rewarded: 32 responses, all 0.0"),
        ("always_one", "all responses have the same reward: 32 responses, all 1"),
        ("of_the_prompt", "all rewards within each prompt are equal, so there is no gradient: 32 responses to "),
    ],
)
def test_where_no_rewards_differ_the_end_of_a_run_says_so_with_two_responses(folder, capfd, reward, message):
    settings = (f"name={reward}", SHOWN, "mode=sync", "train.max_steps=2", "task.eval_fraction=0")
    config = make_config(folder, *settings, reward=reward)
    summary = train(config)
    printed = capfd.readouterr().out
    assert message in printed
    assert "no alarm" not in printed
    assert len(re.findall(r"prompt '[w0-9 ]+', response '[w0-9 ]+', reward ", printed)) == 2
    assert summary["no_signal"]["message"].startswith(message)
    assert len(summary["no_signal"]["samples"]) == 2
    assert json.loads(RunFolder(config.run_folder).summary.read_text())["no_signal"] == summary["no_signal"]
    assert "nothing was evaluated" in printed
    assert not re.search("[│┃┏┌]", printed), "no empty table"


def own(folder, *arguments: str):
    rewards = [{"function": str(folder / "rewards.py:sevens")}]
    own_problem = {"task.data": str(folder / "data.jsonl"), "task.rewards": rewards}
    return given_config([f"output={folder}/named", *arguments], {"model.path": str(folder / "model"), **own_problem})


def test_runs_are_named_by_data_and_reward_and_numbered_where_the_name_was_not_given(folder, capsys):
    config = own(folder)
    assert config.run_name == "data-sevens-tb-seed0"
    assert free_name(config) is None
    for name, wanted in (("data-sevens-tb-seed0", 2), ("data-sevens-tb-seed0-2", 3), ("data-sevens-tb-seed01", 3)):
        (config.output / name).mkdir(parents=True)
        (config.output / name / "config.yaml").touch()
        assert free_name(config) == f"data-sevens-tb-seed0-{wanted}"
    assert f"is there already: this run is {config.output}/data-sevens-tb-seed0-3." in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"2 runs have the name .*`tba train \S+-seed0 --resume` or `\S+"):
        name_to_resume(config)
    (config.output / "data-sevens-tb-seed0" / "config.yaml").unlink()  # an empty folder is no run
    assert name_to_resume(config) == "data-sevens-tb-seed0-2"
    assert name_to_resume(own(folder, "seed=7")) is None


def test_a_name_that_was_given_and_is_taken_is_refused(folder):
    train(make_config(folder, "name=given", "mode=sync", "train.max_steps=1"))
    arguments = command(folder, "given")[3:]
    with pytest.raises(FileExistsError, match="exists already: choose another name"):
        app(arguments, standalone_mode=False)


TWO_PROCESSES = """
import logging, os, time
from tba.config import load_config
from tba.run.supervise import above_the_table
from tba.observe.display import Progress
from tba.runtime.counters import SharedCounters

board, (ended, end) = SharedCounters.create(), os.pipe()

def report_height(lines):
    board.trainer["table_lines"], board.trainer["beats"] = lines, board.trainer["beats"] + 1

def wait_for_tables(count):
    end = board.trainer["beats"] + count
    while board.trainer["beats"] < end:
        time.sleep(0.01)

trainer = os.fork()
if trainer == 0:
    progress = Progress(load_config(), report_height=report_height)
    progress.note("the trainer says this")
    os.read(ended, 1)
    progress.note("the trainer says that")
    progress.close()
    os._exit(0)
logging.basicConfig()
with above_the_table(board):
    wait_for_tables(2)
    for number in (1, 2):
        logging.getLogger("tba").warning("a searcher has died %d " + "x" * 70, number)
        wait_for_tables(2)
    os.write(end, b".")
    os.waitpid(trainer, 0)
    logging.getLogger("tba").warning("the trainer has ended")
"""


def test_lines_of_the_supervisor_and_the_trainers_table_do_not_overwrite_each_other():
    with Terminal([sys.executable, "-c", TWO_PROCESSES]) as terminal:
        assert terminal.wait() == 0, terminal.screen
        assert wait_for(lambda: "has ended" in terminal.screen)
    lines = [line for line in terminal.screen.splitlines() if line.strip()]
    assert [line.partition(" x")[0] for line in lines] == [
        "the trainer says this",
        "WARNING:tba:a searcher has died 1",
        "WARNING:tba:a searcher has died 2",
        "the trainer says that",
        "WARNING:tba:the trainer has ended",
    ]
