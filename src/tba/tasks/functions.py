"""A user's own problem: prompts from a JSONL file, rewards from Python functions.

{"prompt": "What is 2 + 2?", "answer": "4"}
{"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tba.config import TaskConfig
from tba.tasks.base import Outcome, RewardFailed, Split
from tba.tasks.encoding import make_prompt
from tba.tasks.reward_functions import RewardSet
from tba.tasks.rows import BadRow, BadRows, Row, jsonl_rows
from tba.types import Completion, Prompt


class OwnTask:
    """`solved` means that the combined reward reaches 1, the usual meaning of a 0/1 reward."""

    name = "own"
    isolated = True

    def __init__(
        self,
        config: TaskConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        functions: Sequence[Callable[..., Any]] | None = None,
    ) -> None:
        """`functions` stand in for those named in the config (rewards given as Python objects)."""
        self.rewards = RewardSet(config.rewards, functions)
        assert config.data is not None
        self._prompts: dict[Split, list[Prompt]] = {"train": [], "held_out": []}
        splits: dict[Split, str] = {"train": config.data}
        if config.eval_data is not None:
            splits["held_out"] = config.eval_data
        for split, file in splits.items():
            self._prompts[split] = _read_prompts(config, Path(file), tokenizer, max_prompt_tokens)
        if config.eval_data is None:
            self._hold_out(config.eval_fraction)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return self.rewards.weights

    def prompts(self, split: Split) -> Sequence[Prompt]:
        if split == "validation":
            raise ValueError(
                "evaluate.split=validation: your own data (task.name=own) has no validation split. Leave evaluate.split at "
                "held_out, pass your validation file as task.eval_data, and keep the test file for "
                "`tba evaluate RUN task.eval_data=test.jsonl`."
            )
        return self._prompts[split]

    def score(self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]) -> list[Outcome]:
        ids = [completion.token_ids.tolist() for completion in completions]
        return self.rewards.score(prompt.text, prompt.columns, texts, ids)

    def solved(self, outcome: Outcome) -> bool:
        if isinstance(outcome, RewardFailed):
            return False
        total = sum(self.reward_weights[name] * value for name, value in outcome.items() if value is not None)
        return total >= 1.0 - 1e-9

    def _hold_out(self, fraction: float) -> None:
        """Move a share of the prompts, chosen by a hash of their text, to the held-out split."""
        everything = self._prompts["train"]
        for split in ("train", "held_out"):
            self._prompts[split] = [p for p in everything if (_place(p) < fraction) == (split == "held_out")]
        if not self._prompts["train"]:
            raise ValueError(f"task.eval_fraction={fraction} leaves no prompt to train on: lower it or add data.")


def _place(prompt: Prompt) -> float:
    """A number in [0, 1) from the prompt's text: equal prompts fall on the same side."""
    digest = hashlib.blake2b(json.dumps(prompt.text, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _read_prompts(config: TaskConfig, path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Prompt]:
    bad, ids = BadRows(config.on_bad_row), set[str]()

    def read(row: Row) -> Prompt:
        text = _prompt_text(row)
        id = _id(row, path)
        if id in ids:
            raise BadRow("duplicate id", f"{row.place}: id {id!r} occurs twice; ids must be unique.")
        columns = {name: value for name, value in row.value.items() if name != "prompt"}
        prompt = make_prompt(
            id=id, text=text, columns=columns, tokenizer=tokenizer, max_tokens=max_tokens, place=row.place
        )
        ids.add(id)
        return prompt

    prompts = bad.keep(jsonl_rows(path, bad), read)
    bad.report()
    if not prompts:
        but = f" but for {bad.total} bad rows" if bad.total else ""
        raise ValueError(f"{path} is empty{but}: it needs at least one row with a `prompt` column.")
    return prompts


def _prompt_text(row: Row) -> str | list[dict[str, str]]:
    wanted = (
        f"{row.place} has no usable `prompt` column: it must be text or a list of chat messages "
        '({"role": ..., "content": ...}).'
    )
    if not isinstance(row.value, dict):
        raise BadRow("no object", wanted)
    if "prompt" not in row.value:
        raise BadRow("missing column", wanted)
    prompt = row.value["prompt"]
    if not isinstance(prompt, str) and not _is_chat(prompt):
        raise BadRow("wrong type", wanted)
    contents = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    if not any(content.strip() for content in contents):
        raise BadRow("empty prompt", f"{row.place} has no usable `prompt` column: it is empty.")
    return prompt


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )


def _id(row: Row, path: Path) -> str:
    """The `id` column; where there is none, the file's name and the line."""
    id = row.value.get("id")
    if id is None:
        return f"{path.stem}-{row.line}"
    if not isinstance(id, str | int):
        raise BadRow("wrong type", f"{row.place}: `id` is {id!r}, it must be text or a whole number.")
    return str(id)
