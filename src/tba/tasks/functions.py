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
from tba.tasks.rows import jsonl_rows
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
            self._prompts[split] = _read_prompts(Path(file), tokenizer, max_prompt_tokens)
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


def _read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    for place, line, row in jsonl_rows(path):
        if not isinstance(row, dict) or not _is_prompt(row.get("prompt")):
            raise ValueError(
                f"{place} has no usable `prompt` column: it must be text or a list of chat messages "
                '({"role": ..., "content": ...}).'
            )
        text = row.pop("prompt")
        id = str(row.get("id", f"{path.stem}-{line}"))
        if id in prompts:
            raise ValueError(f"{place}: id {id!r} occurs twice; ids must be unique.")
        prompts[id] = make_prompt(id=id, text=text, columns=row, tokenizer=tokenizer, max_tokens=max_tokens)
    if not prompts:
        raise ValueError(f"{path} is empty: it needs at least one row with a `prompt` column.")
    return list(prompts.values())


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
    )
