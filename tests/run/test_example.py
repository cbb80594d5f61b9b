"""examples/sync_loop.py and the library in sync mode are the same method: identical tokens, equal losses, for 20 steps."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from resolved import resolved
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.config import load_config
from tba.models.paths import resolve_path
from tba.observe.run_folder import RunFolder
from tba.run.modes import SyncRun, load_inputs
from tba.runtime.counters import SharedCounters

pytestmark = pytest.mark.slow

STEPS, P, K = 20, 2, 3
Step = tuple[float, float, list[list[int]]]
"""Loss, mean reward, tokens of every response."""


def load_example():
    path = Path(__file__).parents[2] / "examples" / "sync_loop.py"
    spec = importlib.util.spec_from_file_location("sync_loop", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(rows: list[dict]) -> list[Step]:
    path = resolve_path("tba:arithmetic")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    settings = {
        "P": P,
        "K": K,
        "beta": 0.05,
        "learning_rate": 2e-4,
        "temperature": 0.9,
        "max_new_tokens": 40,
        "seed": 3,
    }
    return list(load_example().train(model, AutoTokenizer.from_pretrained(path), rows, steps=STEPS, **settings))


def run_library(output: Path) -> tuple[list[Step], list[dict]]:
    """Steps, and the training problems as rows for the example."""
    config = load_config(
        None,
        [
            "mode=sync", "seed=3", "name=example", f"output={output}", "observe.progress=false", "evaluate.num_prompts=1",
            "task.num_train_prompts=200",
            f"train.max_steps={STEPS}", f"train.responses_per_step={P * K}", f"train.samples_per_prompt={K}",
            "train.learning_rate=2e-4", "objective.beta=0.05", "generate.temperature=0.9", "generate.max_new_tokens=40",
        ],
    )  # fmt: skip
    inputs = load_inputs(config)
    config = resolved(config, inputs.loaded)
    run = SyncRun.make(config, RunFolder.create(config.run_folder, overwrite=False), inputs, SharedCounters.create())
    tokens: list[list[int]] = []
    send = run.searcher.sender.send

    def record_and_send(group) -> None:
        tokens.extend(trajectory.completion.token_ids.tolist() for trajectory in group.trajectories)
        send(group)

    run.searcher.sender.send = record_and_send
    try:
        run.run()
    finally:
        run.close()
    lines = RunFolder(config.run_folder).metrics.read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    steps = [
        (record["tb/loss"], record["batch/reward"], tokens[step * P * K : (step + 1) * P * K])
        for step, record in enumerate(records)
    ]
    rows = [{"id": p.id, "prompt": p.text, "answer": p.columns["answer"]} for p in inputs.task.prompts("train")]
    return steps, rows


def test_the_library_in_sync_mode_equals_the_example(tmp_path):
    library, rows = run_library(tmp_path)
    example = run_example(rows)
    assert len(example) == len(library) == STEPS
    for step, ((loss, reward, tokens), (loss_here, reward_here, tokens_here)) in enumerate(zip(example, library)):
        assert tokens_here == tokens, f"step {step}"
        assert reward_here == pytest.approx(reward, abs=1e-6)
        # Rounding: within 1e-5 on x86; on ARM, which sums matrix products in another order, 1.8e-5; it does not grow.
        assert loss_here == pytest.approx(loss, rel=4e-5, abs=1e-5), f"step {step}"
