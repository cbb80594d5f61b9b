"""What a script saves and shows after a training or an evaluation, by the methods of transformers' Trainer."""

import importlib.util
import json
import shutil

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled
from script_rewards import flat
from trainers import ROWS, make_trainer
from transformers import AutoModelForCausalLM, TrainerCallback, TrainerState

from tba.config import ConfigError
from tba.observe.run_folder import foreign

pytestmark = pytest.mark.slow


def test_a_script_logs_and_saves_metrics_and_state_after_the_run(folder, tmp_path, capsys):
    """The last lines of transformers' example scripts."""
    run = tmp_path / "run"
    trainer = make_trainer(folder, run, flat, max_steps=1, eval_strategy="no", overwrite_output_dir=True)
    metrics = trainer.train().metrics
    metrics["train_samples"] = len(trainer.train_dataset)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_metrics("eval", trainer.evaluate(), combined=False)
    trainer.save_state()
    lines = capsys.readouterr().out.splitlines()
    assert "***** train metrics *****" in lines
    shown = dict(line.replace(" ", "").split("=") for line in lines if " = " in line)
    assert (shown["train_samples"], shown["steps"], shown["final/reward"]) == ("30", "1", "0.5")
    saved = {name: json.loads((run / f"{name}_results.json").read_text()) for name in ("train", "eval", "all")}
    assert saved["train"] == saved["all"] == metrics
    assert saved["eval"]["eval_reward"] == 0.5
    assert TrainerState.load_from_json(str(run / "trainer_state.json")).log_history == trainer.state.log_history
    trainer.save_model()
    assert foreign(run) == []  # overwrite_output_dir may replace it
    trainer.train()
    assert not (run / "train_results.json").exists()


def test_metrics_of_the_start_model_can_be_saved_before_the_run(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path / "run", flat, max_steps=1, eval_strategy="no")
    trainer.save_metrics("start", {"eval_reward": 0.25})
    trainer.save_metrics("other", {"eval_solved": 0.0})
    trainer.train()
    assert json.loads((tmp_path / "run" / "start_results.json").read_text()) == {"eval_reward": 0.25}
    both = {"eval_reward": 0.25, "eval_solved": 0.0}
    assert json.loads((tmp_path / "run" / "all_results.json").read_text()) == both


def test_the_datasets_are_attributes_as_they_were_given(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path / "run", flat, max_steps=1)
    assert trainer.train_dataset is ROWS
    assert trainer.eval_dataset is None


class Loads(TrainerCallback):
    """Loads each checkpoint when it is told of it, by TRL's name."""

    def on_save(self, args, state, control, **kwargs):
        AutoModelForCausalLM.from_pretrained(f"{args.output_dir}/checkpoint-{state.global_step}")


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_checkpoints_have_trls_names_and_a_second_training_keeps_the_first(folder, tmp_path, caplog):
    run, sizes = tmp_path / "run", {"eval_strategy": "no", "save_steps": 1}
    first = make_trainer(folder, run, flat, [Loads()], max_steps=3, **sizes).train()
    assert (first[0], first[1]) == (first.global_step, first.training_loss) == (3, first.metrics["train_loss"])
    assert checkpoints(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]  # all: there is no save_total_limit
    assert foreign(run) == []
    (run / "notes.txt").write_text("my own")

    make_trainer(folder, run, flat, max_steps=2, **sizes).train()
    assert checkpoints(run) == ["checkpoint-1", "checkpoint-2"]
    assert checkpoints(run / "earlier-1") == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert AutoModelForCausalLM.from_pretrained(run / "earlier-1" / "checkpoint-3")
    assert f"{run} held an earlier run: it is now {run / 'earlier-1'}." in caplog.text
    assert foreign(run) == ["notes.txt"]

    resumed = make_trainer(folder, run, flat, max_steps=4, **sizes)
    assert resumed.train(resume_from_checkpoint=str(run / "checkpoint-1")).global_step == 4
    again = make_trainer(folder, run, flat, max_steps=4, **sizes)
    assert again.train(resume_from_checkpoint=True).global_step == 4  # no step is left to make, as in TRL
    assert again.state.log_history == resumed.state.log_history
    with pytest.raises(
        FileNotFoundError, match=r"checkpoint-9 is no whole checkpoint.*it has checkpoint-1, checkpoint-2"
    ):
        again.train(resume_from_checkpoint=str(run / "checkpoint-9"))
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match="the trained weights are gone"):  # the start model has others
        again.evaluate()


def test_a_folder_of_trls_own_run_is_trained_in_and_nothing_of_it_is_lost(folder, tmp_path, caplog):
    run = tmp_path / "run"
    for name in ("checkpoint-1", "runs", "logs"):
        (run / name).mkdir(parents=True)
        (run / name / "of_trl").touch()
    make_trainer(folder, run, flat, max_steps=1, eval_strategy="no").train()
    assert sorted(path.parent.name for path in run.rglob("of_trl")) == ["checkpoint-1", "logs", "runs"]
    assert f"{run / 'checkpoint-1'} cannot be a link" in caplog.text


def test_a_hub_that_is_not_there_is_told_before_training(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineModeIsEnabled):
        make_trainer(folder, tmp_path / "run", flat, max_steps=1, push_to_hub=True)


def test_a_logger_that_is_not_installed_is_refused_by_the_constructor(folder, tmp_path):
    missing = [name for name in ("wandb", "tensorboard") if importlib.util.find_spec(name) is None]
    if not missing:
        pytest.skip("both are installed")
    with pytest.raises(ValueError, match=f"report_to has '{missing[0]}', which needs a package: pip install"):
        make_trainer(folder, tmp_path / "run", flat, max_steps=1, report_to=missing[:1])
