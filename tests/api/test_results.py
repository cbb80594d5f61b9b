"""What a script saves and shows after a training or an evaluation, by the methods of transformers' Trainer."""

import json

from script_rewards import flat
from trainers import ROWS, make_trainer
from transformers import TrainerState

from tba.observe.contents import foreign


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
