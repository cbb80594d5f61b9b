"""Whole runs on a tiny model: both modes, their files, and that lag 0 is sync."""

import json

import pytest
import torch
from problem import make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.config import load_config
from tba.launch import evaluate_model, train
from tba.observe.files import RunFolder


def metrics_of(config) -> list[dict]:
    return [json.loads(line) for line in RunFolder(config.run_folder).metrics.read_text().splitlines()]


def test_a_sync_run_writes_its_folder(folder):
    config = make_config(folder, "mode=sync", "name=sync", "train.checkpoint_every=2")
    summary = train(config)
    run = RunFolder(config.run_folder)
    assert json.loads(run.summary.read_text()) == summary
    assert list(summary) == [
        "task", "objective", "seed", "steps", "seconds", "responses_generated", "responses_trained", "start", "final", "lag",
    ]  # fmt: skip
    assert (summary["steps"], summary["responses_trained"], summary["lag"]) == (6, 96, {"mean": 0.0, "max": 0})
    assert load_config(run.config) == config
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step-4", "step-6"]
    steps = [record for record in metrics_of(config) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    sample = json.loads(run.samples.read_text().splitlines()[0])
    assert sample["responses"][0]["text"].startswith("w")


def test_before_the_first_step_policy_and_reference_agree(folder):
    config = make_config(folder, "mode=sync", "name=agree", "train.max_steps=1", "generate.temperature=0.7")
    train(config)
    first = next(record for record in metrics_of(config) if "loss" in record)
    assert abs(first["kl"]) < 1e-4
    assert first["off_policy/ess"] == pytest.approx(1.0, abs=1e-4)


def test_the_checkpoint_loads_with_transformers_and_evaluates(folder):
    config = make_config(folder, "mode=sync", "name=load", "train.max_steps=2")
    summary = train(config)
    checkpoint = RunFolder(config.run_folder).newest_checkpoint()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model.generate(**tokenizer("w5 w6", return_tensors="pt"), max_new_tokens=3)
    assert evaluate_model(str(config.run_folder), []) == summary["final"]


def test_two_searchers_and_a_trainer_for_twenty_steps(folder):
    config = make_config(folder, "name=two", "search.num_searchers=2", "train.max_steps=20", "evaluate.every=10")
    summary = train(config)
    assert summary["steps"] == 20
    assert summary["responses_trained"] == 320
    assert summary["responses_generated"] * config.replay.max_trained_per_generated >= 320
    evaluated = [record["step"] for record in metrics_of(config) if "eval/own/accuracy" in record]
    assert evaluated[0] == 0
    assert evaluated[-1] == 20
    assert RunFolder(config.run_folder).samples.read_text()


def test_lag_0_in_the_async_runtime_equals_sync_mode(folder):
    """The same tokens, hence the same rewards and lengths, and the same losses."""
    sync = make_config(folder, "mode=sync", "name=equal-sync")
    paced = ["replay.lag=pace", "replay.max_lag=0", "replay.fresh_steps=1", "replay.on_policy_probability=1"]
    paced += ["replay.deduplicate=false", "replay.max_trained_per_generated=1", "generate.update=drain"]
    lag_0 = make_config(folder, "name=equal-async", *paced)
    train(sync)
    summary = train(lag_0)
    assert summary["lag"] == {"mean": 0.0, "max": 0}
    for want, got in zip(*([r for r in metrics_of(config) if "loss" in r] for config in (sync, lag_0)), strict=True):
        assert got["reward"] == pytest.approx(want["reward"], abs=1e-7)
        assert got["completions/mean_length"] == want["completions/mean_length"]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    a, b = (
        AutoModelForCausalLM.from_pretrained(RunFolder(config.run_folder).newest_checkpoint())
        for config in (sync, lag_0)
    )
    gap = max((x - y).abs().max().item() for x, y in zip(a.parameters(), b.parameters()))
    assert gap < 1e-5
    assert torch.isfinite(next(a.parameters())).all()


def test_a_run_folder_is_not_overwritten_unless_asked(folder):
    config = make_config(folder, "mode=sync", "name=twice", "train.max_steps=1")
    train(config)
    with pytest.raises(FileExistsError, match="choose another name"):
        train(config)
    train(config.model_copy(update={"overwrite": True}))
