"""Runs with environments, from a script and from the command: sync, async, resumed and evaluated."""

import json
import sys
from pathlib import Path

import games
import pytest
import torch
from builders import tiny_llama
from chat_families import family_tokenizer
from commands import run_command

from tba import TBAConfig, TBATrainer
from tba.observe.run_folder import RunFolder

TBA = [sys.executable, "-m", "tba"]
GAMES = Path(games.__file__)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = family_tokenizer("qwen_2_5")
    stop = tokenizer.eos_token_id
    made = tiny_llama(0, vocab_size=len(tokenizer), max_position_embeddings=3000, eos_token_id=stop)
    with torch.no_grad():  # short turns: the end-of-turn token is likely
        made.lm_head.weight[stop] = 3.0 * made.lm_head.weight[stop]
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SETTINGS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 60,
    "learning_rate": 1e-3,
    "disable_tqdm": True,
    "max_steps": 2,
}


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_trl_environments_from_a_script(model, tmp_path, mode):
    def share_of_guesses(completions, environments, **columns):
        assert all(environment.secret in range(1, 10) for environment in environments)
        assert all(messages[0]["role"] == "assistant" for messages in completions)
        return [float(len(environment.guesses)) for environment in environments]

    rows = [{"prompt": [{"role": "user", "content": f"Game {number}."}]} for number in range(24)]
    args = TBAConfig(output_dir=tmp_path / "out", mode=mode, max_tool_calling_iterations=3, **SETTINGS)
    trainer = TBATrainer(
        str(model), share_of_guesses, args, rows, environment_factory=games.Guess, tools=[games.double]
    )
    result = trainer.train()
    assert result.global_step == 2
    assert trainer.config.task.environment.max_turns == 3
    lines = [json.loads(line) for line in RunFolder(tmp_path / "out").metrics.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 2
    assert all({"rewards/Guess/mean", "rewards/share_of_guesses/mean"} <= set(line) for line in steps)


@pytest.mark.slow
def test_step_environments_without_data_from_the_command(model, tmp_path):
    words = ["train", "--model", str(model), "--environment", f"{GAMES}:Echo", "mode=sync", "name=echo", "--max-steps"]
    small = ["train.responses_per_step=8", "train.samples_per_prompt=4", "generate.max_new_tokens=80"]
    small += ["evaluate.num_prompts=4", "train.learning_rate=1e-3", "observe.progress=false", f"output={tmp_path}"]
    run_command([*TBA, *words, "2", *small])
    folder = RunFolder(tmp_path / "echo")
    before = folder.metrics.read_text()
    assert '"rewards/Echo/mean"' in before
    run_command([*TBA, "train", str(folder.path), "--resume", "--max-steps", "3"])
    assert folder.metrics.read_text().startswith(before)
    assert '"reward"' in run_command([*TBA, "evaluate", str(folder.path)]).stdout
