"""Runs whose episodes are played by an agent: an ordinary loop with OpenAI's client and a tool."""

import importlib.util
import json
from pathlib import Path

import pytest

from tba import TBAConfig, TBATrainer
from tba.observe.run_folder import RunFolder

for name in ("openai", "uvicorn"):
    pytest.importorskip(name, reason="pip install -e '.[dev]' brings it")

EXAMPLE = Path(__file__).parents[2] / "examples" / "environments" / "agent.py"


def example():
    spec = importlib.util.spec_from_file_location("agent", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_of_the_example_says_what_is_wrong():
    assert example().multiply('{"a": 347, "b": 86}') == "29842"
    assert example().multiply('{"a": 347}') == "KeyError: 'b'"
    assert example().multiply("[]").startswith("TypeError")


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_an_agent_plays_the_episodes_of_a_run(tmp_path, mode):
    rows = [{"prompt": f"What is {a} * {b}?", "answer": str(a * b)} for a in range(101, 109) for b in (21, 32, 43)]
    args = TBAConfig(
        output_dir=tmp_path / "out",
        mode=mode,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=48,
        learning_rate=1e-4,
        disable_tqdm=True,
        max_steps=3,
    )
    trainer = TBATrainer("tba:tools", None, args, rows, agent=f"{EXAMPLE}:run")
    assert trainer.train().global_step == 3
    lines = [json.loads(line) for line in RunFolder(tmp_path / "out").metrics.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 3
    assert all("rewards/run/mean" in line for line in steps)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["lost"] is None
