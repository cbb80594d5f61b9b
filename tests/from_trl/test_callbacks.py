"""Callbacks of transformers meet what they meet under its own Trainer: order, wishes, the best metric."""

from typing import Any

import pytest
import torch
from script_rewards import down_at_step_3, flat, half_at_step_2, longer
from trainers import ROWS, make_trainer
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback, TrainerState

from tba import TBAConfig
from tba.trl.callbacks import Callbacks

pytestmark = pytest.mark.slow


class Heard(TrainerCallback):
    """Writes down events; asks for a checkpoint when step 2 or 4 is evaluated (of 4 there is one), and for an
    evaluation when step 3 is logged."""

    def __init__(self):
        self.events = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.events.append(("step_begin", state.global_step))

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(("step_end", state.global_step))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.events.append(("log", state.global_step))
            control.should_evaluate = state.global_step == 3

    def on_evaluate(self, args, state, control, **kwargs):
        self.events.append(("evaluate", state.global_step))
        control.should_save = state.global_step in (2, 4)

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))


def test_events_come_in_the_order_of_transformers_and_what_they_ask_for_is_done(folder, tmp_path):
    heard = Heard()
    trainer = make_trainer(folder, tmp_path / "run", flat, [heard], max_steps=4, eval_steps=2)
    trainer.train()
    assert heard.events == [
        ("evaluate", 0),
        *(("step_begin", 0), ("step_end", 1), ("log", 1)),
        *(("step_begin", 1), ("step_end", 2), ("log", 2), ("evaluate", 2), ("save", 2)),
        *(("step_begin", 2), ("step_end", 3), ("log", 3), ("evaluate", 3)),
        *(("step_begin", 3), ("step_end", 4), ("log", 4), ("save", 4), ("evaluate", 4)),
    ]
    assert trainer.state.epoch == pytest.approx(4 * 2 / 29)  # two prompts a step, of 30 rows less one held out
    assert trainer.state.num_train_epochs == 1


def test_an_evaluation_that_comes_late_is_told_with_its_own_step():
    heard = Heard()
    callbacks = Callbacks([heard], args=TBAConfig(), state=TrainerState(), context=dict, steps_per_epoch=4)
    callbacks.begins(0, list)
    for step in range(3):
        callbacks.step_begins(step)
        callbacks.step_ends(step + 1)
    callbacks.evaluated(2, {"reward": 1.0})
    assert heard.events[-1] == ("evaluate", 2)
    assert callbacks.state.log_history == [{"eval_reward": 1.0, "step": 2, "epoch": 0.5}]
    assert (callbacks.state.global_step, callbacks.state.epoch) == (3, 0.75)


class Epochs(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.events.append(("begin", state.global_step))

    def on_epoch_end(self, args, state, control, **kwargs):
        self.events.append(("end", state.global_step))


def test_an_epoch_is_told_of_at_both_its_ends(folder, tmp_path):
    heard = Epochs()
    make_trainer(folder, tmp_path / "run", flat, [heard], ROWS[:6], max_steps=4, eval_strategy="no").train()
    assert heard.events == [("begin", 0), ("end", 3), ("begin", 3), ("end", 4)]  # two of six rows a step


def test_early_stopping_stops_a_run_that_gets_no_better(folder, tmp_path):
    trainer = make_trainer(
        folder, tmp_path / "run", flat, [EarlyStoppingCallback(2)], max_steps=9, metric_for_best_model="eval_reward"
    )
    assert trainer.args.greater_is_better is True  # as transformers decides where it is not given
    assert trainer.train().global_step == 3  # the first evaluation is the best, and two are no better
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.5, 1)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoints" / "best-step-3")


def test_an_evaluation_without_the_metric_that_decides_is_never_the_best(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path / "run", down_at_step_3, max_steps=4, evaluate={"num_prompts": 2})
    summary = trainer.train()
    lacking = [record["step"] for record in trainer.state.log_history if record.get("eval_solved") == 0.0]
    assert lacking == [0, 1, 2, 3, 4]  # also where there is no reward: 0 is above every reward here
    assert summary["best"] == {"step": 4, "score": -1.0}


def test_accuracy_decides_also_where_a_reward_is_neither_0_nor_1(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path / "run", half_at_step_2, max_steps=3, metric_for_best_model="eval_accuracy")
    assert trainer.train()["best"] == {"step": 3, "score": 1.0}
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 1)


class StopAtStep2(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what differs between two equal runs."""
    measured = ("seconds", "time/", "perf/")
    return [{name: value for name, value in record.items() if not name.startswith(measured)} for record in history]


def test_a_resumed_run_has_the_history_and_the_best_metric_of_one_that_was_never_stopped(folder, tmp_path):
    whole = make_trainer(folder, tmp_path / "whole", half_at_step_2, max_steps=4)
    whole.train()
    make_trainer(folder, tmp_path / "run", half_at_step_2, [StopAtStep2()], max_steps=4).train()
    resumed = make_trainer(folder, tmp_path / "run", half_at_step_2, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert without_times(resumed.state.log_history) == without_times(whole.state.log_history)
    assert (resumed.state.best_metric, resumed.state.best_global_step) == (1.0, 1)  # before it was stopped


def test_a_run_that_begins_anew_has_no_history(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path / "run", flat, max_steps=1, overwrite_output_dir=True)
    trainer.train()
    trainer.train()
    assert [record["step"] for record in trainer.state.log_history if "loss" in record] == [1]


class Models(TrainerCallback):
    """Keeps what it is given as the model: its output layer at each event, None where there is no model."""

    def __init__(self):
        self.seen = {}

    def _see(self, event, model, processing_class):
        known = None if model is None else model.lm_head.weight.detach().clone()
        self.seen[event] = (known, processing_class is not None and processing_class.eos_token)

    def on_init_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        self._see("init", model, processing_class)

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        self._see("begin", model, processing_class)

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        self._see("end", model, processing_class)


@pytest.mark.parametrize("by_name", [True, False])
def test_callbacks_get_the_model_that_is_being_trained(folder, tmp_path, by_name):
    given, heard = AutoModelForCausalLM.from_pretrained(folder / "model"), Models()
    start = given.lm_head.weight.detach().clone()
    model = str(folder / "model") if by_name else given
    trainer = make_trainer(folder, tmp_path / "run", longer, [heard], model=model, max_steps=2, eval_strategy="no")
    known = heard.seen["init"][0]
    assert known is None if by_name else torch.equal(known, start)  # a name is not loaded for this
    trainer.train()
    assert torch.equal(heard.seen["begin"][0], start)
    assert not torch.equal(heard.seen["end"][0], start)
    assert torch.equal(heard.seen["end"][0], trainer.model.lm_head.weight)
    assert heard.seen["begin"][1] == heard.seen["end"][1] == trainer.processing_class.eos_token
