"""Scripts with environments and tools in the forms of TRL's documentation and examples, run with their import changed and
nothing else. They need the `datasets` package that comes with TRL (`make test-trl`).

The model plays its part by chance: each next token is one of six, and four of them are whole turns with a tool call.
"""

import sys
from pathlib import Path

import pytest
import torch
from builders import tiny_llama
from chat_families import family_tokenizer
from commands import run_command
from tokenizers import AddedToken

pytest.importorskip("datasets", reason="the extra `benchmark` is not installed")

CALLS = [
    '{"name": "multiply", "arguments": {"a": 6, "b": 7}}',
    '{"name": "say", "arguments": {"text": "good morning"}}',
    '{"name": "move", "arguments": {"direction": "left"}}',
    '{"name": "add", "arguments": {"step": 2}}',
]

TOOLS = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def multiply(a: int, b: int) -> int:
    \"\"\"
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        Their product.
    \"\"\"
    return a * b

async def add(step: int) -> int:
    \"\"\"
    Adds one.

    Args:
        step: The integer.

    Returns:
        The next integer.
    \"\"\"
    return step + 1

def results(completions, answer, **kwargs):
    seen = [{m["name"]: m["content"] for m in completion if m["role"] == "tool"} for completion in completions]
    assert all(own.get("multiply", "42") == "42" and own.get("add", "3") == "3" for own in seen), seen
    assert all("there is no tool" in own.get("move", "there is no tool") for own in seen), seen
    return [float(own.get("multiply") == a) for own, a in zip(seen, answer)]

rows = {"prompt": [[{"role": "user", "content": f"What is {n} times 7?"}] for n in range(6)], "answer": ["42"] * 6}
trainer = GRPOTrainer(
    model="model", tools=[multiply, add], reward_funcs=results, train_dataset=Dataset.from_dict(rows),
    args=GRPOConfig(max_tool_calling_iterations=2, SETTINGS),
)
trainer.train()
print("called", any(record.get("rewards/results/mean", 0) > 0 for record in trainer.state.log_history))
"""
# As in OpenEnv's examples: a client of a server in an attribute, which holds locks and connections; the class is local; the
# reward reads another attribute; all rows ask the same.
CLIENT = """
import argparse
import threading
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

class Client:
    def __init__(self, base_url):
        self.base_url, self.lock = base_url, threading.Lock()

    def step(self, text):
        with self.lock:
            return text.upper()

def reward_func(environments, **kwargs):
    return [env.reward for env in environments]

def main():
    args = argparse.Namespace(env_host="https://echo.example")

    class EchoToolEnv:
        def __init__(self):
            self.env = Client(base_url=args.env_host)
            self.reward = 0.0

        def reset(self, **kwargs) -> None | str:
            self.reward = 0.0
            return None

        def say(self, text: str) -> str:
            \"\"\"
            Say something to the environment.

            Args:
                text: What to say.

            Returns:
                What the environment says.
            \"\"\"
            self.reward += len(text) / 10
            return self.env.step(text)

    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Try to say 'good morning'."}]] * 16})
    trainer = GRPOTrainer(
        model="model", train_dataset=dataset, reward_funcs=reward_func, environment_factory=EchoToolEnv,
        args=GRPOConfig(chat_template_kwargs={"enable_thinking": False}, log_completions=True,
                        num_completions_to_print=1, SETTINGS),
    )
    trainer.train()
    trainer.end()
    print("called", any(record.get("rewards/reward_func/mean", 0) > 0 for record in trainer.state.log_history))

if __name__ == "__main__":
    main()
"""
# The environment owns the data: no dataset, no reward function.
OWN_DATA = """
import random
from trl import GRPOConfig, GRPOTrainer

class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.choice([2, 4])
        return f"Add up to {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def add(self, step: int) -> int:
        \"\"\"
        Add to the counter.

        Args:
            step: What is added.

        Returns:
            The counter.
        \"\"\"
        self.counter += step
        return self.counter

trainer = GRPOTrainer(model="model", args=GRPOConfig(SETTINGS), environment_factory=IncrementEnv)
trainer.train()
print("called", any(record.get("rewards/IncrementEnv/mean", 0) > 0 for record in trainer.state.log_history))
"""
# A dict of environments, and a dataset that only says which row has which.
ROUTED = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

class TalkEnv:
    def reset(self, **kwargs) -> str:
        self.said = 0
        return "Say something."

    def say(self, text: str) -> str:
        \"\"\"Say something.

        Args:
            text: What to say.
        \"\"\"
        self.said += 1
        return text

class GameEnv:
    def reset(self, **kwargs) -> str:
        assert "environment" not in kwargs
        self.place = 0
        return "Reach the goal on the left."

    def move(self, direction: str) -> str:
        \"\"\"Take a step.

        Args:
            direction: "left" or "right".
        \"\"\"
        if direction not in ("left", "right"):
            raise ValueError("Game over.")
        self.place -= 1
        return f"You are at {self.place}."

def talk_reward(environments, **kwargs) -> list[float | None]:
    return [float(env.said) if isinstance(env, TalkEnv) else None for env in environments]

def game_reward(environments, **kwargs) -> list[float | None]:
    return [float(-env.place) if isinstance(env, GameEnv) else None for env in environments]

dataset = Dataset.from_dict({"environment": ["talk", "game"] * 20})
trainer = GRPOTrainer(
    model="model", args=GRPOConfig(chat_template_kwargs={"enable_thinking": False}, SETTINGS), train_dataset=dataset,
    reward_funcs=[talk_reward, game_reward], environment_factory={"talk": TalkEnv, "game": GameEnv},
)
trainer.train()
names = ("rewards/talk_reward/mean", "rewards/game_reward/mean")
print("called", all(any(record.get(name, 0) > 0 for record in trainer.state.log_history) for name in names))
"""
SETTINGS = """output_dir="out", max_steps=2, per_device_train_batch_size=16, num_generations=4, max_completion_length=80,
    learning_rate=1e-4, logging_steps=1, bf16=False, use_cpu=True, report_to="none", save_strategy="no", seed=1"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each token that it writes is a call, a word or the end of the turn, all equally likely."""
    tokenizer = family_tokenizer("qwen_3")
    words = [f"<tool_call>\n{call}\n</tool_call>" for call in CALLS]
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    likely = [*map(tokenizer.convert_tokens_to_ids, words), tokenizer.convert_tokens_to_ids("tool")]
    likely += [tokenizer.eos_token_id]
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 3000, "tie_word_embeddings": False}
    made = tiny_llama(0, eos_token_id=likely[-1], **sizes)
    with torch.no_grad():
        # One direction of the hidden state is large for all tokens, and these six are read from it.
        made.get_input_embeddings().weight[:, 0] = 100.0
        made.lm_head.weight[:] = 0.0
        made.lm_head.weight[likely, 0] = 2.0
    folder = tmp_path_factory.mktemp("scripts") / "model"
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(TOOLS, id="tools"),
        pytest.param(CLIENT, id="client"),
        pytest.param(OWN_DATA, id="own_data"),
        pytest.param(ROUTED, id="routed"),
    ],
)
def test_an_environment_script_of_trl_runs_with_its_import_changed(model, tmp_path, script):
    (tmp_path / "model").symlink_to(model)
    script = script.replace("from trl import", "from tba import").replace("SETTINGS", SETTINGS)
    (tmp_path / "script.py").write_text(script)
    done = run_command([sys.executable, "script.py"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "called True" in done.stdout
