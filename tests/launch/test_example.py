"""examples/sync_loop.py and the library in sync mode are the same method: identical tokens, equal losses, for 20 steps."""

import importlib.util
import json
from pathlib import Path

import pytest
from problem import make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.launch.inputs import load_inputs
from tba.launch.synchronous import SyncRun
from tba.observe.files import RunFolder

STEPS, P, K = 20, 4, 4


def load_example():
    path = Path(__file__).parents[2] / "examples" / "sync_loop.py"
    spec = importlib.util.spec_from_file_location("sync_loop", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(folder) -> list[tuple[float, float, list[list[int]]]]:
    lines = (folder / "data.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"id": f"data-{number}"} for number, line in enumerate(lines, start=1)]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def reward(text: str, row: dict) -> float:
        return text.split().count(row["want"]) / max(1, len(text.split()))

    settings = {"P": P, "K": K, "beta": 0.1, "learning_rate": 1e-3, "temperature": 0.8, "max_new_tokens": 8, "seed": 3}
    return list(load_example().train(model, tokenizer, rows, reward=reward, steps=STEPS, **settings))


def run_library(folder) -> list[tuple[float, float, list[list[int]]]]:
    overrides = [f"train.max_steps={STEPS}", f"train.responses_per_step={P * K}", f"train.samples_per_prompt={K}"]
    overrides += ["objective.beta=0.1", "generate.temperature=0.8", "task.eval_fraction=0", "seed=3", "mode=sync"]
    config = make_config(folder, "name=example", *overrides, reward="sevens_if_ended")
    run = SyncRun.make(config, RunFolder.create(config.run_folder, overwrite=False), load_inputs(config))
    tokens: list[list[int]] = []
    send = run.searcher.sender.send
    run.searcher.sender.send = lambda group: (
        tokens.extend(t.completion.token_ids.tolist() for t in group.trajectories),
        send(group),
    )
    try:
        run.run()
    finally:
        run.close()
    records = [json.loads(line) for line in RunFolder(config.run_folder).metrics.read_text().splitlines()]
    return [
        (record["tb/loss"], record["reward"], tokens[step * P * K : (step + 1) * P * K])
        for step, record in enumerate(records)
    ]


def test_the_library_in_sync_mode_equals_the_example(folder):
    example, library = run_example(folder), run_library(folder)
    assert len(example) == len(library) == STEPS
    for step, ((loss, reward, tokens), (loss_here, reward_here, tokens_here)) in enumerate(zip(example, library)):
        assert tokens_here == tokens, f"step {step}"
        assert reward_here == pytest.approx(reward, abs=1e-6)
        assert loss_here == pytest.approx(loss, rel=1e-5), f"step {step}"
    assert example[-1][1] > example[0][1]
