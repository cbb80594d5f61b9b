"""The command line: what it prints, how it exits, what its errors say."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import run_command
from problem import with_settings
from typer.testing import CliRunner

import tba as tba_package
from tba.cli import app, main
from tba.cli.training import given_config
from tba.config import ConfigError, load_config
from tba.models.paths import resolve_path
from tba.run import doctor, evaluate_model
from tba.run.checks import TASK_NAMES, collapse_message, run_of
from tba.run.doctor import EXTRAS
from tba.tasks.registry import TASKS

RUNNER = CliRunner()


def tba(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tba", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_dry_run_prints_the_resolved_config(folder):
    options = ["--model", "some/model", "--data", "d.jsonl", "--reward", "r.py:f", "--max-steps", "7"]
    result = RUNNER.invoke(app, ["train", *options, "seed=5", "--dry-run"])
    config = yaml.safe_load(result.stdout)
    assert (config["train"]["max_steps"], config["seed"], config["model"]["path"]) == (7, 5, "some/model")
    assert config["task"]["name"] == "custom"
    assert config["task"]["rewards"][0]["function"] == "r.py:f"


def test_a_dry_run_under_torchrun_is_that_of_rank_0_alone(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    result = RUNNER.invoke(app, ["train", "--dry-run"])
    assert (result.exit_code, result.stdout) == (0, "")


def test_other_data_for_a_config_file_keeps_its_rewards(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("task: {name: custom, data: a.jsonl, rewards: [{function: r.py:f, weight: 0.5}]}")
    task = given_config([str(path)], {"task.data": "b.jsonl"}).task
    assert (task.data, task.rewards[0].function, task.rewards[0].weight) == ("b.jsonl", "r.py:f", 0.5)
    with pytest.raises(ConfigError, match=r"task\.rewards is empty"):
        given_config([], {"task.data": "b.jsonl"})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num_generations=8", "num_generations is TRL's name: use train.samples_per_prompt."),
        ("train.num_generations=8", "num_generations is TRL's name: use train.samples_per_prompt."),
        ("max_completion_length=8", "max_completion_length is TRL's name: use generate.max_new_tokens."),
        ("batch_size=8", "per_device_train_batch_size is TRL's name: use train.responses_per_step."),
        ("train.batch_size=8", "per_device_train_batch_size is TRL's name: use train.responses_per_step."),
        ("eval_steps=8", "eval_steps is TRL's name: use evaluate.every."),
        ("min_p=0.1", "min_p is TRL's name: use top_p or top_k."),
        ("lr=1e-5", "did you mean train.learning_rate?"),
        ("max_tokens=8", "did you mean generate.max_new_tokens?"),
        ("top_p=0.9", "did you mean generate.top_p?"),
        ("frobnicate=8", "the config takes name, output"),
    ],
)
def test_names_of_trl_and_near_misses_find_our_settings(setting, message):
    with pytest.raises(ConfigError) as error:
        given_config([setting, "seed=1"], {})
    assert str(error.value).startswith(f"unknown key {setting.partition('=')[0]}: {message}")


def test_a_wrong_key_is_told_without_torch():
    program = "import sys; from tba.cli.usage import trl_message; trl_message('lr'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_two_config_files_are_refused():
    with pytest.raises(ConfigError, match="one config file at a time"):
        given_config(["a.yaml", "b.yaml"], {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "train.max_step=1"], "did you mean train.max_steps?"),
        (["train", "nowhere.yaml"], "config file nowhere.yaml does not exist"),
    ],
)
def test_errors_are_words_without_a_traceback_and_exit_status_2(arguments, message):
    done = tba(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "model.path=./nowhere"], "there is no such folder"),
        (["train", "model.path=tba:nothing"], "is not shipped with the package"),
        (["prepare", "nothing"], "'nothing' has nothing to prepare"),
    ],
)
def test_so_are_those_that_come_later(arguments, message, monkeypatch, capfd, tmp_path):
    """In this process: by then torch is loaded, which takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tba", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--run-name", "x"], "tba train: there is no option --run-name: run_name is TRL's name: use name."),
        (["train", "--lr", "1"], "no option --lr: did you mean train.learning_rate=...?"),
        (["evaluate", "x", "--num-generations", "2"], "num_generations is TRL's name: use train.samples_per_prompt."),
        (["train", "--max-step", "3"], "tba train: there is no option --max-step: did you mean --max-steps?"),
        (["train", "--learning-rate", "1"], "no option --learning-rate: did you mean train.learning_rate=...?"),
        (["doctor", "--verbose"], "tba doctor: there is no option --verbose. Options are --help."),
        (["--version"], "tba: there is no option --version. Options are --help."),
        (["trian"], "tba: there is no command trian: did you mean train? Commands are train, evaluate, serve, compare"),
        (["resume", "runs/a"], "tba: there is no command resume: did you mean tba train --resume? Commands are train,"),
        (["frobnicate"], "tba: there is no command frobnicate. Commands are train, evaluate, serve, compare"),
        (["train", "--max-steps", "1", "--max-steps", "2"], "tba train: --max-steps is given twice: keep one of them."),
        (
            ["train", "--max-steps", "1", "train.max_steps=2"],
            "tba: train.max_steps is given two values on the command line: --max-steps 1 and train.max_steps=2.",
        ),
        (
            ["train", "seed=1", "name=a", "seed=2"],
            "two values on the command line: seed=1 and seed=2. Keep one of them.",
        ),
        (["train", "--model", "a", "model.path=b"], "two values on the command line: --model a and model.path=b."),
        (
            ["evaluate", "tba:arithmetic", "--num-prompts", "3", "evaluate.num_prompts=4"],
            "evaluate.num_prompts is given two values on the command line: --num-prompts 3",
        ),
        (["train", "--max-steps", "x"], "tba train: --max-steps: 'x' is not a whole number"),
        (["train", "--max-steps"], "Option '--max-steps' requires an argument"),
        (["evaluate", "runs/x", "--samples", "2.5"], "tba evaluate: --samples: '2.5' is not a whole number"),
        (["compare", "s.yaml", "--wait-seconds", "soon"], "tba compare: --wait-seconds: 'soon' is not a number"),
        (["evaluate"], "tba evaluate: MODEL_OR_RUN is missing: write `tba evaluate MODEL_OR_RUN`"),
        (["scale", "run"], "tba scale: --count INTEGER is missing: write `tba scale RUN --count INTEGER`"),
        (["train", "."], "tba: . is a folder, not a config file: give a YAML file."),
        (["replay", "run", "--limit", "-3"], "tba replay: --limit: -3 is below 0: write 0 or more."),
        (
            ["replay", "run", "--limit", str(2**63)],
            "tba replay: --limit: 9223372036854775808 is beyond 9223372036854775807",
        ),
        (["scale", "run", "--count", "0"], "tba scale: --count: 0 is below 1: write 1 or more."),
        (["prepare", "reward_model", "--epochs", "0"], "tba prepare: --epochs: 0 is below 1: write 1 or more."),
        (["replay", "run", "--min-reward", "nan"], "tba replay: --min-reward: 'nan' is not a number"),
        (
            ["doctor", "/nowhere"],
            "tba: model.path='/nowhere': there is no such folder. Give a folder with config.json or",
        ),
        (["compare"], "tba compare: STUDY.yaml is missing: write `tba compare STUDY.yaml`"),
        (["merge", "run"], "tba merge: OUTPUT is missing: write `tba merge ADAPTER_OR_RUN OUTPUT`"),
        (["prepare"], "tba prepare: WHAT is missing: write `tba prepare WHAT`."),
        (["doctor", "x", "y"], "See `tba doctor --help`."),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_status_2(arguments, message, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["tba", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capfd.readouterr()
    assert ended.value.code == 2
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


def test_what_is_wrong_with_a_model_is_said_once(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["tba", "doctor", "./nowhere"])
    with pytest.raises(SystemExit):
        main()
    assert capfd.readouterr().err.count("nowhere") == 1


def test_a_working_folder_that_is_gone_is_named(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    monkeypatch.setattr(sys, "argv", ["tba", "config", "length"])
    with pytest.raises(SystemExit) as ended:
        main()
    monkeypatch.undo()
    assert ended.value.code == 2
    assert capfd.readouterr().err == "tba: the working folder has been deleted: cd into one that is there.\n"


def test_without_a_command_the_help_is_shown_with_exit_status_2(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["tba"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "evaluate" in capfd.readouterr().out


def test_numbers_given_as_options_arrive_as_numbers():
    result = RUNNER.invoke(app, ["train", "--max-steps", "7", "--dry-run"])
    assert yaml.safe_load(result.stdout)["train"]["max_steps"] == 7
    with pytest.raises(ConfigError, match="study file"):  # --wait-seconds and its default were accepted
        RUNNER.invoke(app, ["compare", "nowhere.yaml", "--wait-seconds", "1e3"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="study file"):
        RUNNER.invoke(app, ["compare", "nowhere.yaml"], catch_exceptions=False)


@pytest.mark.slow
def test_train_and_evaluate_from_the_command_line(folder, monkeypatch, capfd):
    options = [
        "--model",
        f"{folder}/model",
        "--data",
        f"{folder}/data.jsonl",
        "--reward",
        f"{folder}/rewards.py:sevens",
    ]
    settings = with_settings("mode=sync", f"output={folder}/runs", "name=cli", "train.max_steps=2")
    done = run_command([sys.executable, "-m", "tba", "train", *options, *settings])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
    # In this process, where torch is loaded.
    arguments = ["tba", "evaluate", f"{folder}/runs/cli", "--samples", "2", "--num-prompts", "3"]
    monkeypatch.setattr(sys, "argv", arguments)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    found = json.loads(capfd.readouterr().out)
    names = ["solved", "reward", "pass@2", "avg@2", "reward@2"]
    errors = {f"{name}_standard_error" for name in names}
    by_chance = {"accuracy", "accuracy_standard_error"}  # where all of these few rewards are 0 or 1
    assert set(found) - by_chance == {*names, "num_prompts"} | errors
    assert found["num_prompts"] == 2  # of 3 that were asked for: the file holds out no more
    # A checkpoint is evaluated as its run is, not on the default task.
    newest = evaluate_model(f"{folder}/runs/cli/checkpoints/step-2", ["evaluate.samples_per_prompt=2"])
    assert newest == found
    with pytest.raises(ConfigError, match=r"model\.path cannot be set here"):
        evaluate_model(f"{folder}/runs/cli", [f"model.path={folder}/model"])


def test_a_run_or_a_checkpoint_in_the_place_of_a_config_is_told_how_to_go_on(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-1"
    (checkpoint / "inner").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    for path in (tmp_path / "run", checkpoint):
        with pytest.raises(ConfigError, match=f"`tba train {path} --resume` goes on with this run"):
            load_config(path)
    for path in (tmp_path, checkpoint / "inner"):
        with pytest.raises(ConfigError, match="give a YAML file"):
            load_config(path)


def test_a_run_is_known_by_its_config_and_a_checkpoint_by_that_of_its_run(tmp_path):
    for run in ("plain", "checkpoints/inner"):  # output=checkpoints is a name as any other
        (tmp_path / run / "checkpoints" / "step-1").mkdir(parents=True)
        (tmp_path / run / "config.yaml").touch()
        for part in ("", "checkpoints/step-1"):
            found = run_of(str(tmp_path / run / part))
            assert found is not None
            assert found.path == tmp_path / run
    assert run_of(str(tmp_path / "checkpoints")) is run_of("tba:arithmetic") is None


def test_whoever_evaluates_a_collapsed_run_is_told_of_the_checkpoint_from_before(tmp_path):
    for step in (50, 60):
        checkpoint = tmp_path / "run" / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    run = tmp_path / "run"
    (run / "config.yaml").write_text("")
    collapse = {"step": 64, "since": 55, "checkpoint": "checkpoints/step-50"}
    (run / "summary.json").write_text(json.dumps({"outcome": "collapsed", "collapse": collapse}))
    assert collapse_message(str(run)) == (
        f"{run} collapsed, since about step 55: its newest checkpoint is evaluated, of step 60. The one from before the "
        f"collapse is {run}/checkpoints/step-50."
    )
    assert collapse_message(f"{run}/checkpoints/step-60") is collapse_message("tba:arithmetic") is None
    (run / "summary.json").write_text(json.dumps({"outcome": "finished", "collapse": collapse}))
    assert collapse_message(str(run)) is None


def test_a_model_of_the_package_is_evaluated_on_its_own_task_which_is_said(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["tba", "evaluate", "tba:tldr", "--num-prompts", "2", "generate.max_new_tokens=2"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capfd.readouterr()
    assert ended.value.code == 0, printed.err
    assert "win_rate" in json.loads(printed.out)
    assert printed.err.count("tba:tldr is evaluated on its own task, tldr: --task names another.") == 1


def test_a_model_that_knows_no_task_is_refused_with_all_of_them(folder):
    with pytest.raises(ConfigError, match=r"evaluated on: .* --task: arithmetic, .* --task custom task\.data="):
        evaluate_model(f"{folder}/model", ["evaluate.num_prompts=2", f"task.data={folder}/data.jsonl"])
    assert sorted(name.removesuffix(":NAME") for name in TASK_NAMES) == sorted(TASKS)


def test_a_run_of_a_model_alone_is_refused_and_one_of_the_package_learns_its_own_task_which_is_said(folder, tmp_path):
    for model, arguments in ((f"{folder}/model", []), (None, [f"model.path={folder}/model", "task.eval_fraction=0.2"])):
        with pytest.raises(ConfigError, match=r"nothing says what .*/model is to be trained on.*--data .* --reward "):
            given_config(arguments, {"model.path": model})
    path = tmp_path / "own.yaml"
    path.write_text("task: {name: tldr}")
    assert given_config([str(path)], {"model.path": f"{folder}/model"}).task.name == "tldr"
    result = RUNNER.invoke(app, ["train", "--model", "tba:red_team", "--dry-run"])
    assert yaml.safe_load(result.stdout)["task"]["name"] == "red_team"
    assert result.stderr == "tba:red_team is trained on its own task, red_team: task.name names another.\n"


@pytest.mark.parametrize(("command", "module"), [("config", "tba.cli"), ("train", "tba.runtime.processes")])
def test_ctrl_c_while_the_command_is_imported_is_no_traceback(command, module):
    program = """
import sys
command, module = sys.argv[1:]
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.argv = ["tba", command]
from tba.__main__ import main
main()
"""
    line = [sys.executable, "-c", program, command, module]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_standard_stream_may_be_closed(closed):
    command = f"{shlex.quote(sys.executable)} -m tba config length {closed}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_machine_without_room_for_a_process_is_named_without_a_traceback(tmp_path):
    program = """
import sys
import psutil
class NoProcess(psutil.Popen):
    def __init__(self, *arguments, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")  # as fork does beyond `ulimit -u`
psutil.Popen = NoProcess
sys.argv = ["tba", "train", "train.max_steps=1"]
from tba.__main__ import main
main()
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    message = "tba: the run's processes cannot be started: Resource temporarily unavailable; `ulimit -a` shows limits."
    assert (result.returncode, result.stderr.splitlines()[-1]) == (2, message)
    assert "Traceback" not in result.stderr


def test_doctor_names_what_the_machine_has():
    result = RUNNER.invoke(app, ["doctor"])
    assert result.exit_code == 0
    for word in ("python", "torch", "transformers", "cores", "memory", "disk", "gpu", "wandb"):
        assert word in result.stdout


def test_doctor_asks_about_mps_before_it_uses_the_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: asked.append("gpu") or 0)
    monkeypatch.setattr(doctor, "why_no_mps", lambda _: asked.append("mps") or "there is no GPU")
    found = dict(doctor.examine())
    assert (asked, found["mps"]) == (["mps", "gpu"], "not used: there is no GPU")


def test_doctor_names_only_packages_that_the_program_can_use():
    sources = "\n".join(path.read_text() for path in Path(tba_package.__file__).parent.rglob("*.py"))
    for name in EXTRAS:
        assert f"import {name}" in sources or f"from {name}" in sources or f"torch.utils.{name}" in sources, name


@pytest.mark.slow
def test_a_reward_model_is_trained_on_pairs(tmp_path):
    pairs = [
        {"prompt": f"so place harbour {i} TL;DR:", "chosen": "place harbour", "rejected": "so so"} for i in range(40)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = ["--pairs", str(tmp_path / "pairs.jsonl"), "--output", str(tmp_path / "rm"), "--learning-rate", "1e-3"]
    result = RUNNER.invoke(
        app, ["prepare", "reward_model", "--model", resolve_path("tba:tldr"), *options, "--epochs", "3"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["accuracy"] > 0.9
    assert (tmp_path / "rm" / "reward.json").is_file()


def test_preparing_without_what_it_needs_is_refused():
    with pytest.raises(ConfigError, match="needs --model"):
        RUNNER.invoke(app, ["prepare", "reward_model"], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"'tldr' has nothing to prepare.*`python -m recipes TASK`"):
        RUNNER.invoke(app, ["prepare", "tldr"], catch_exceptions=False)
