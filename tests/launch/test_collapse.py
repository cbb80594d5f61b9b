"""A run that collapses: it stops or warns in words, and the weights from before are kept."""

import json
import logging

import pytest
from problem import make_config
from transformers import AutoModelForCausalLM

from tba.launch import evaluate_model, train
from tba.observe.files import RunFolder
from tba.train.health import Collapsed

ABSURD = "train.learning_rate={kind: cosine, start: 1e-4, end: 1.0}"
"""Rises to a thousand times what the tiny model bears: within forty steps its responses are one or two tokens long."""
SETTINGS = ("mode=sync", "seed=3", "train.max_steps=100", "evaluate.num_prompts=1", "objective.beta=0.05", ABSURD)


def test_a_collapsed_run_stops_and_its_healthy_checkpoint_loads(folder):
    config = make_config(
        folder, *SETTINGS, "name=stop", "observe.on_collapse=stop", "observe.healthy_checkpoint_every=5"
    )
    with pytest.raises(Collapsed, match="the run is collapsing, since about step"):
        train(config)
    run = RunFolder(config.run_folder)
    summary = json.loads(run.summary.read_text())
    collapse = summary["collapse"]
    assert summary["outcome"] == "collapsed"
    assert summary["steps"] == collapse["step"] < 100
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    alarms = [record["guard/alarm"] for record in records if "loss" in record]
    assert alarms == [0.0] * (collapse["step"] - 1) + [1.0]

    (kept,) = run.checkpoints.iterdir()
    assert kept == run.path / collapse["checkpoint"] == run.newest_checkpoint()
    step = int(kept.name.removeprefix("healthy-step-"))
    assert step < collapse["since"] <= step + 5 + 1
    AutoModelForCausalLM.from_pretrained(kept)
    assert json.loads((kept / "trainer.json").read_text())["step"] == step
    assert "accuracy" in evaluate_model(str(run.path), [])


def test_by_default_it_warns_once_trains_on_and_pins_the_checkpoint_from_before(folder, caplog):
    settings = [*SETTINGS, "train.max_steps=40", ABSURD.replace("}", ", steps: 100}"), "train.keep_checkpoints=3"]
    config = make_config(folder, *settings, "name=warn", "train.checkpoint_every=4")
    with caplog.at_level(logging.WARNING, logger="tba"):
        summary = train(config)
    assert summary["steps"] == 40
    assert sum("is collapsing" in record.message for record in caplog.records) == 1
    run = RunFolder(config.run_folder)
    pinned = max(step for step in range(0, 40, 4) if step < summary["collapse"]["since"])
    assert summary["collapse"]["checkpoint"] == f"checkpoints/step-{pinned}"
    assert sorted(run.checkpoints_by_step()) == [pinned, 32, 36, 40]


def test_a_run_without_a_collapse_leaves_only_its_own_checkpoints(folder):
    settings = ["mode=sync", "train.max_steps=5", "observe.healthy_checkpoint_every=2"]
    config = make_config(folder, *settings, "name=well")
    assert train(config)["collapse"] is None
    assert {path.name for path in RunFolder(config.run_folder).checkpoints.iterdir()} - {"best-step-5"} == {"step-5"}

    asked = make_config(folder, *settings, "name=asked", "observe.keep_healthy_checkpoint=true")
    train(asked)
    names = {path.name for path in RunFolder(asked.run_folder).checkpoints.iterdir()}
    assert "healthy-step-4" in names

    none = make_config(folder, *settings, "name=none", "train.keep_checkpoints=0")
    train(none)
    assert list(RunFolder(none.run_folder).checkpoints.iterdir()) == []


def test_the_guard_can_be_switched_off(folder):
    config = make_config(folder, "mode=sync", "train.max_steps=2", "name=unguarded", "observe.on_collapse=off")
    train(config)
    lines = RunFolder(config.run_folder).metrics.read_text()
    assert "guard/" not in lines
