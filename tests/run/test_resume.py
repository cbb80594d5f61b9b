"""Runs that end in the middle and go on: after SIGKILL every logged number is compared exactly with an undisturbed run's."""

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from commands import Command
from problem import make_config, wait_for, with_settings

from tba import TBATrainer
from tba.cli import app
from tba.cli.training import checkpoint_among, given_config, run_arguments
from tba.config import Config, ConfigError, Schedule, dump_config, load_config
from tba.observe.files import keep_lines
from tba.observe.recorder import PastLine, RunListener
from tba.observe.run_folder import CLAIM as CLAIM
from tba.observe.run_folder import Claim, FolderInUse, RunFolder
from tba.replay.database import DurableReplayError
from tba.run import train
from tba.run.resume import checkpoint_to_resume
from tba.run.status import read_status
from tba.run.supervise import later_checkpoints, supervise
from tba.trainer.checkpoint import drop_folder, read_state

COMMON = ("train.max_steps=12", "train.checkpoint_every=1", "evaluate.every=4")
RUNS = {
    "tb with replay": ["mode=sync", "replay.on_policy_probability=0.5", "replay.inverse_temperature=1"],
    "second updates": ["mode=sync", "train.second_update_after=2"],
    # Step 5 is the first of two on its batch.
    "ppo": ["mode=sync", "objective.name=ppo", "train.updates_per_batch=2", "train.checkpoint_every=5"],
    "fixed_lag": [
        *("mode=fixed_lag", "replay.max_lag=2", "train.learning_rate=auto"),
        "train.checkpoint_every=5",
    ],
    "resets": [
        *("mode=sync", "objective.name=tb_learned_z", "reference.reset_every=3"),
        *("replay.on_reference_reset=recompute", "replay.on_policy_probability=0.5"),
    ],
}
CLOCKED = ("seconds", "time/", "perf/", "searcher/")
"""Beginnings of the names of metrics that a clock decides."""


def lines(run: RunFolder) -> list[dict]:
    """Of metrics.jsonl, without what a clock measured."""
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(CLOCKED)} for line in found]


def steps(run: RunFolder) -> list[int]:
    return [line["step"] for line in lines(run) if "loss" in line]


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def run_and_kill(folder: Path, name: str, *overrides: str) -> None:
    """Run the command in a process of its own, and kill it with its children once there is a checkpoint of step 5."""
    run = RunFolder(folder / "runs" / name)
    command = [
        *(sys.executable, "-m", "tba", "train", "--model", f"{folder}/model", "--data", f"{folder}/data.jsonl"),
        *("--reward", f"{folder}/rewards.py:sevens"),
        *with_settings(f"output={folder}/runs", f"name={name}", *overrides),
    ]

    def newest() -> int:
        return max(run.checkpoints_by_step(), default=0)

    with Command(command) as process:
        reached = wait_for(lambda: process.poll() is not None or newest() >= 5)
        with suppress(ProcessLookupError):  # it has ended, and its errors say why
            os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
    assert reached
    assert process.returncode == -signal.SIGKILL, errors


def in_a_new_process(config: Config, *, resume: bool = False) -> None:
    """As the killed run was: by a supervisor, with the trainer in a process of its own."""
    assert supervise(config, resume=resume, target="tba.cli.training:run_trainer") == 0


@pytest.mark.parametrize(
    "name", [name if name == "tb with replay" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_killed_run_continues_with_the_same_tokens_and_losses(folder, name):
    whole, killed = (RunFolder(folder / "runs" / f"{name}, {end}") for end in ("whole", "killed"))
    in_a_new_process(make_config(folder, *COMMON, *RUNS[name], f"name={whole.path.name}"))
    run_and_kill(folder, killed.path.name, *with_settings(*RUNS[name], base=COMMON))
    assert not killed.summary.exists()
    in_a_new_process(make_config(folder, *COMMON, *RUNS[name], f"name={killed.path.name}"), resume=True)
    assert steps(killed) == list(range(1, 13))
    assert lines(killed) == lines(whole)
    assert killed.samples.read_text() == whole.samples.read_text()
    summaries = [json.loads(run.summary.read_text()) | {"seconds": 0, "elapsed_seconds": 0} for run in (killed, whole)]
    assert summaries[0] == summaries[1]
    assert names(killed) == names(whole)
    assert len(killed.checkpoints_by_step("best-step-")) <= 1
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (killed.newest_checkpoint() / file).read_bytes() == (whole.newest_checkpoint() / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["model.lora={}"],
        ["objective.name=grpo", "train.learning_rate=auto", "train.truncated=penalise"],
        [
            "search.explore.probability=0.5",
            "search.explore.temperature=[0.8, 1.5]",
            "search.explore.reference_share=0.25",
            "replay.on_policy_probability=0.3",
            "replay.importance_weighted=true",
            "replay.deduplicate=true",
        ],
        ["generate.engine=transformers", "replay.max_lag=2", "replay.on_policy_probability=0.5"],
    ],
    ids=["lora", "grpo", "exploration", "transformers"],
)
def test_steps_that_are_made_again_from_an_older_checkpoint_are_the_same(folder, settings, request):
    config = make_config(
        folder, "mode=sync", f"name={request.node.callspec.id}-again", "train.checkpoint_every=1",
        "train.keep_checkpoints=9", *settings,
    )  # fmt: skip
    train(config)
    run = RunFolder(config.run_folder)
    before = lines(run), run.samples.read_text(), names(run)
    train(config, resume=run.checkpoints / "step-3")
    assert (lines(run), run.samples.read_text(), names(run)) == before


@pytest.fixture(scope="module")
def finished(folder) -> Config:
    """A run of six steps with checkpoints of steps 2, 4 and 6."""
    config = make_config(folder, "mode=sync", "name=finished", "train.checkpoint_every=2", "train.keep_checkpoints=3")
    train(config)
    return config


@pytest.fixture
def copied(finished, folder, request) -> Config:
    """A copy of that run, to go on for eight steps."""
    config = make_config(
        folder, "mode=sync", f"name={request.node.name}", "train.checkpoint_every=2", "train.keep_checkpoints=3",
        "train.max_steps=8",
    )  # fmt: skip
    shutil.copytree(finished.run_folder, config.run_folder)
    return config


def test_a_finished_run_goes_on_when_it_may_take_more_steps(copied):
    summary = train(copied, resume=True)
    run = RunFolder(copied.run_folder)
    assert steps(run) == list(range(1, 9))
    assert (summary["steps"], summary["responses_generated"], summary["responses_trained"]) == (8, 128, 128)
    assert load_config(run.config).train.max_steps == 8
    with pytest.raises(ValueError, match=r"is finished: step 8 of train\.max_steps=8"):
        train(copied, resume=True)


class Heard(RunListener):
    """Keeps what a resumed run tells of the steps before."""

    past: Sequence[PastLine] = ()

    def begins(self, step: int, past: Callable[[], Sequence[PastLine]]) -> None:
        self.past = past()


def test_an_evaluation_that_came_after_the_checkpoint_was_saved_is_kept_and_may_be_the_best(copied):
    """As an asynchronous run leaves it: searchers had not answered for steps 3 and 6, the last one, when that was saved."""
    run, heard = RunFolder(copied.run_folder), Heard()
    keep_lines(run.metrics, len(run.metrics.read_text().splitlines()) - 1)  # the evaluation of step 6
    late = [{"step": step, "seconds": 1.0, "eval/custom/reward": 99.0 + step} for step in (3, 6)]
    with run.metrics.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in late) + '{"step": 4, "eval/cus')
    for path in run.checkpoints_by_step("best-step-").values():
        shutil.rmtree(path)
    shutil.copytree(run.checkpoints / "step-4", run.checkpoints / "best-step-3")
    summary = train(copied, resume=True, listener=heard)
    told = [(line.step, line.metrics["reward"]) for line in heard.past if line.is_evaluation and line.step > 0]
    assert told == [(3, 102.0), (6, 105.0)]
    assert [line["step"] for line in lines(run) if "eval/custom/reward" in line] == [0, 3, 6, 8]
    assert summary["best"] == {"step": 3, "score": 102.0}
    assert "best-step-3" in names(run)


def test_a_run_keeps_the_defaults_of_its_objective_that_it_was_started_with(copied):
    """Another version of this package may have had others: tb's beta was .01 for responses of any length."""
    run = RunFolder(copied.run_folder)
    run.config.write_text(dump_config(load_config(run.config, ["objective.beta=0.02", "replay.deduplicate=true"])))
    train(copied, resume=True)
    made = [line for line in lines(run) if "loss" in line]
    unit = 2.0 * max(line.get("tb/reward_spread", 0.0) for line in made)  # beta is in it, and logged in that of rewards
    assert [line["beta"] for line in made][-2:] == pytest.approx([0.02 * unit] * 2)
    assert load_config(run.config).objective.beta == Schedule(start=0.02)
    assert load_config(run.config).replay.deduplicate is True
    other = copied.objective.model_copy(update={"beta": Schedule(start=0.03)})
    with pytest.raises(ConfigError, match=r"objective\.beta\.start was 0\.02 and is 0\.03"):
        train(copied.model_copy(update={"objective": other}), resume=True)


def test_a_corrupt_checkpoint_is_named_and_the_one_before_it_used(copied, caplog):
    run = RunFolder(copied.run_folder)
    damaged = run.checkpoints_by_step()[6] / "state.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="tba"):
        train(copied, resume=True)
    assert "step-6 is damaged: state.safetensors has another checksum" in caplog.text
    assert steps(run) == list(range(1, 9))
    assert "corrupt-step-6" in names(run)


def test_what_is_not_whole_is_never_resumed_from(copied):
    run = RunFolder(copied.run_folder)
    newest = run.checkpoints_by_step()[6]
    (newest / "manifest.json").unlink()
    shutil.copytree(newest, newest.with_name(".step-7.partial"))
    (run.checkpoints / "step-by-step").mkdir()
    with run.metrics.open("a") as file:
        file.write('{"step": 7, "lo')  # the line that a killed process was writing
    train(copied, resume=True)
    assert steps(run) == list(range(1, 9))
    assert "step-by-step" in names(run)
    assert ".step-7.partial" not in names(run)


def test_settings_that_decide_what_is_learned_may_not_change(copied):
    other = copied.model_copy(update={"seed": 3, "train": copied.train.model_copy(update={"max_grad_norm": None})})
    with pytest.raises(ConfigError, match=r"seed was 0 and is 3; train.max_grad_norm was 1.0 and is None"):
        train(other, resume=True)
    shorter = copied.model_copy(update={"train": copied.train.model_copy(update={"max_steps": 5})})
    with pytest.raises(ConfigError, match=r"train.max_steps was 6 and is 5"):
        train(shorter, resume=True)


def test_data_that_have_moved_are_wanted_back_at_their_place(copied, tmp_path):
    """Given at their new place they would be other settings, which are refused."""
    config = copied.model_copy(update={"task": copied.task.model_copy(update={"eval_data": f"{tmp_path}/moved.jsonl"})})
    with pytest.raises(
        ValueError, match=r"task\.eval_data: .*moved\.jsonl is not there any more.* or put a link there"
    ):
        train(config, resume=True)


def test_there_must_be_something_to_resume(copied, folder):
    with pytest.raises(FileNotFoundError, match="there is no run to resume in"):
        train(make_config(folder, "mode=sync", "name=never-started"), resume=True)
    with pytest.raises(
        ConfigError, match=r"there is no run to resume in runs/never-started: give the folder, the name"
    ):
        run_arguments(["runs/never-started"])
    with pytest.raises(ConfigError, match=r"sets nothing: .* write train.max_steps=VALUE"):
        run_arguments(["train.max_steps"])
    with pytest.raises(ConfigError, match=r"there is no run to resume in .* \(it has no config\.yaml\)"):
        run_arguments([str(folder / "model")])
    run = RunFolder(copied.run_folder)
    with pytest.raises(FileNotFoundError, match=r"step-3 is no whole checkpoint .* it has step-2, step-4, step-6"):
        train(copied, resume=run.checkpoints / "step-3")
    shutil.rmtree(run.checkpoints)
    with pytest.raises(FileNotFoundError, match="has no checkpoint to resume from"):
        train(copied, resume=True)
    run.config.write_text("")
    with pytest.raises(FileNotFoundError, match=r"\(its config\.yaml is empty\)"):
        train(copied, resume=True)


def test_damaged_metrics_are_named_and_a_summary_without_numbers_is_no_hindrance(copied):
    longer = copied.model_copy(update={"train": copied.train.model_copy(update={"max_steps": 7})})
    run = RunFolder(copied.run_folder)
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(b"\xff\xfe\n" + whole)
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 1 is damaged, it is no JSON"):
        train(longer, resume=True)
    run.metrics.write_bytes(whole)
    run.summary.write_text('{"outcome": "finished"}')
    assert train(longer, resume=True)["steps"] == 7


@pytest.mark.slow
def test_the_trainer_of_the_api_resumes_from_a_named_checkpoint(copied, folder):
    trainer = TBATrainer(str(folder / "model"), f"{folder}/rewards.py:sevens", copied, str(folder / "data.jsonl"))
    run = RunFolder(copied.run_folder)
    trainer.train(resume_from_checkpoint=str(run.checkpoints / "step-4"))
    assert steps(run) == list(range(1, 9))


def rollouts_handed_out(run: RunFolder) -> int:
    """Rollouts that the searchers had been given at the newest checkpoint."""
    checkpoint = run.newest_checkpoint()
    assert checkpoint is not None
    return read_state(checkpoint)["parts"]["trainer"]["rollouts"]["handed_out"]


@pytest.mark.slow
def test_an_asynchronous_run_goes_on_where_it_was(folder):
    settings = ["name=async", "train.checkpoint_every=2", "replay.max_lag=3"]
    train(make_config(folder, *settings, "train.max_steps=5"))
    run = RunFolder(folder / "runs" / "async")
    first = rollouts_handed_out(run)
    summary = train(make_config(folder, *settings, "train.max_steps=14"), resume=True)  # more than was generated
    assert steps(run) == list(range(1, 15))
    assert (summary["steps"], summary["responses_trained"]) == (14, 14 * 16)
    assert rollouts_handed_out(run) > first
    lags = [line[f"off_policy/lag_{kind}"] for line in lines(run) if "loss" in line for kind in ("mean", "max")]
    assert 0 <= min(lags) <= max(lags) <= 3, "the pace limit holds after the resume as before"


@pytest.mark.slow
def test_a_run_may_go_on_with_another_number_of_searchers(folder):
    settings = ["name=more-searchers", "train.checkpoint_every=2"]
    train(make_config(folder, *settings, "train.max_steps=3"))
    run = RunFolder(folder / "runs" / "more-searchers")
    train(make_config(folder, *settings, "train.max_steps=6", "search.num_searchers=2"), resume=True)
    assert steps(run) == list(range(1, 7))
    assert (run.logs / "searcher-1.log").is_file()


def test_a_run_is_named_by_its_config_its_folder_or_its_name(finished, folder):
    path, output = finished.run_folder, f"output={folder}/runs"
    by_checkpoint = [str(path / "checkpoints" / "step-2")]
    assert (checkpoint_among(by_checkpoint), checkpoint_among([str(path)])) == (Path(by_checkpoint[0]), None)
    by_path = [str(path)], [str(path / "config.yaml")], by_checkpoint, ["finished/checkpoints/step-2", output]
    assert checkpoint_among(by_path[-1]) == Path(by_checkpoint[0])
    for arguments in (*by_path, ["finished", output], ["name=finished", output]):
        found = given_config(run_arguments(arguments), {})
        assert found.run_folder == path
        assert found.task == load_config(path / "config.yaml").task


def test_the_command_goes_back_to_a_checkpoint_that_is_named(copied):
    run = RunFolder(copied.run_folder)
    (run.checkpoints_by_step()[6] / "state.json").write_text("never read: the run goes back before it")
    app(["train", str(run.checkpoints / "step-4"), "--resume", "train.max_steps=8"], standalone_mode=False)
    assert steps(run) == list(range(1, 9))
    assert "corrupt-step-6" not in names(run)
    assert read_status(run.path)["step"] == 8
    elsewhere = copied.model_copy(update={"replay": copied.replay.model_copy(update={"durability": "node"})})
    with pytest.raises(ConfigError, match=r"cannot be gone back to with replay.durability=node"):
        supervise(elsewhere, resume=run.checkpoints / "step-4", target="never")
    (run.checkpoints / "step-5").mkdir()
    with pytest.raises(FileNotFoundError, match=r"step-5 is no whole checkpoint .* it has"):
        train(copied, resume=checkpoint_among([str(run.checkpoints / "step-5")]))


def test_a_folder_is_locked_before_a_resume_changes_it(copied, monkeypatch):
    """Two at once would both set damaged checkpoints aside."""
    run = RunFolder(copied.run_folder)

    def locked(folder: RunFolder, *arguments):
        with pytest.raises(FolderInUse):
            Claim.take(folder.path)
        return checkpoint_to_resume(folder, *arguments)

    monkeypatch.setattr("tba.run.start.checkpoint_to_resume", locked)
    train(copied, resume=True)
    assert steps(run) == list(range(1, 9))


def test_a_run_whose_stored_groups_are_lost_goes_on_only_where_that_is_accepted(copied, capfd):
    run = RunFolder(copied.run_folder)
    before = names(run)
    run.replay.unlink()
    with pytest.raises(DurableReplayError, match=rf"{run.replay} does not exist on .*: `tba train {run.path} --resume"):
        train(copied, resume=True)
    command = ["train", str(run.path), "--resume", "train.max_steps=8"]
    assert app(command, standalone_mode=False) == 2
    assert "24 of 24 stored groups are lost" in capfd.readouterr().err
    assert names(run) == before
    assert not (run.path / CLAIM).exists()
    with pytest.raises(ConfigError, match="--accept-lost-replay is for a run that goes on: write --resume too"):
        app(["train", "--accept-lost-replay"], standalone_mode=False)
    assert app([*command, "--accept-lost-replay"], standalone_mode=False) == 0
    assert "24 of 24 stored groups are lost, and the run goes on without them" in capfd.readouterr().err
    assert steps(run) == list(range(1, 9))


def test_what_a_run_gives_up_is_told_from_what_it_makes_again(copied):
    run = RunFolder(copied.run_folder)
    whole = {step: path.resolve() for step, path in run.checkpoints_by_step().items()}
    assert {path for path, _ in later_checkpoints(run, whole[2])} == {whole[4], whole[6]}
    assert later_checkpoints(run, whole[6]) == later_checkpoints(run, run.checkpoints / "step-3") == set()
    given_up = later_checkpoints(run, whole[4])
    train(copied, resume=whole[4])
    again = later_checkpoints(run, whole[4])
    assert {path.name for path, _ in again} == {"step-6", "step-8"}
    assert not given_up & again, "step 6 has been made again, and the next trainer goes on from there"


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_goes_back_can_go_on_from_what_is_left(copied, monkeypatch):
    run = RunFolder(copied.run_folder)
    undisturbed, dropped = lines(run), []

    def killed_by_the_second(path: Path) -> None:
        if dropped:
            raise KeyboardInterrupt
        dropped.append(path.name)
        drop_folder(path)

    with monkeypatch.context() as patched:
        patched.setattr("tba.trainer.checkpoint.drop_folder", killed_by_the_second)
        with pytest.raises(KeyboardInterrupt):
            train(copied, resume=run.checkpoints / "step-2")
    assert dropped == ["step-6"], "the newest goes first"
    train(copied, resume=True)
    assert steps(run) == list(range(1, 9))
    assert lines(run)[: len(undisturbed) - 1] == undisturbed[:-1]


def test_checkpoints_may_lie_behind_a_link(copied, tmp_path):
    run = RunFolder(copied.run_folder)
    shutil.move(run.checkpoints, tmp_path / "scratch")
    run.checkpoints.symlink_to(tmp_path / "scratch")
    app(["train", str(run.checkpoints / "step-4"), "--resume", "train.max_steps=8"], standalone_mode=False)
    assert steps(run) == list(range(1, 9))


def test_whoever_resumes_a_collapsed_run_is_told_how_to_go_on_from_before(copied, caplog):
    run = RunFolder(copied.run_folder)
    collapse = {"step": 6, "since": 5, "checkpoint": "checkpoints/step-4"}
    run.summary.write_text(json.dumps({"outcome": "collapsed", "collapse": collapse, "steps": 6, "seconds": 1.0}))
    message = f"tba train {run.checkpoints}/step-4 --resume observe.on_collapse=rollback"
    with caplog.at_level(logging.WARNING, logger="tba"):
        assert checkpoint_to_resume(run, copied, run.checkpoints / "step-4") == run.checkpoints / "step-4"
        assert message not in caplog.text
        shutil.move(run.checkpoints / "step-6", folder := run.path / "elsewhere")
        assert checkpoint_to_resume(run, copied, True) == run.checkpoints / "step-4"
        assert message not in caplog.text, "it goes on from before the collapse anyway"
        shutil.move(folder, run.checkpoints / "step-6")
        assert checkpoint_to_resume(run, copied, True) == run.checkpoints / "step-6"
    assert message in caplog.text


def test_the_command_resumes_a_run_whose_folder_exists(copied):
    app(["train", str(copied.run_folder), "--resume", "train.max_steps=8"], standalone_mode=False)
    assert steps(RunFolder(copied.run_folder)) == list(range(1, 9))
