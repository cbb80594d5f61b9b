"""Shipped configs: all are valid, and those of the embedded tasks run."""

import json
from pathlib import Path

import pytest
from resolved import resolved

from tba.config import load_config
from tba.run.compare import make_plan
from tba.run.start import train
from tba.run.study import load_study

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_valid(path):
    resolved(load_config(path, ["model.path=somewhere"]))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((CONFIGS / "studies").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("quick", [False, True])
def test_every_run_of_every_study_is_valid(path, quick, tmp_path):
    plan = make_plan(load_study(path, quick=quick), tmp_path)
    assert plan.runs


def test_the_papers_tldr_beta_is_that_of_the_official_code():
    """bbartoldson/TBA c6075e2, src/tba_trainer_tldr.py: from 1, 128ths of the way to .05, and .05 from update 32 on."""
    config = load_config(CONFIGS / "tldr.yaml")
    # Updates 1, 17, 31, 32 and 256 are steps 0, 16, 30, 31 and 255; 1 - .95 x 16 / 128 and 1 - .95 x 30 / 128.
    assert [config.beta_at(step, config.progress_at(step)) for step in (0, 16, 30, 31, 255)] == pytest.approx(
        [1, 0.88125, 0.77734375, 0.05, 0.05]
    )


def test_the_papers_gsm8k_learning_rate_has_the_official_shape():
    """launch_training_gsm8k.sh of the same: 50 steps of warm-up, 350 stable, cosine decay over 600; 700 are trained."""
    config = load_config(CONFIGS / "gsm8k.yaml")
    shares = [config.learning_rate_at(step, config.progress_at(step)) / 2e-6 for step in (49, 50, 400, 500, 600, 700)]
    # (1 + cos(pi / 6)) / 2, (1 + cos(pi / 3)) / 2, (1 + cos(pi / 2)) / 2
    assert shares == pytest.approx([1, 1, 1, (2 + 3**0.5) / 4, 0.75, 0.5])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tldr_cpu", "red_team_cpu"])
def test_an_embedded_task_trains_and_evaluates(name, tmp_path):
    small = ["train.max_steps=4", "train.responses_per_step=32", "evaluate.every=2", "observe.progress=false"]
    small += ["train.samples_per_prompt=32"] if name == "red_team_cpu" else ["task.num_train_prompts=200"]
    small += ["train.learning_rate=1e-3"]  # auto begins lower than four steps can show
    small += ["evaluate.num_prompts=40", "evaluate.samples_per_prompt=64", f"output={tmp_path}", "name=run"]
    summary = train(load_config(CONFIGS / f"{name}.yaml", small))
    assert summary["steps"] == 4
    headline = "win_rate" if name == "tldr_cpu" else "success"
    assert next(iter(summary["final"])) == headline
    assert summary["start"]["kl"] == pytest.approx(0.0, abs=1e-3)
    assert summary["final"]["kl"] > 1e-3
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    task = "tldr" if name == "tldr_cpu" else "red_team"
    assert sum(f"eval/{task}/{headline}" in record for record in records) >= 2
