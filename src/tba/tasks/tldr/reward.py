"""Our own reward model: the body of a causal language model and a linear head that gives every token a score.

Pooling `sum` adds up the scores of the response's tokens, EOS included; `last` takes that of the last token. A sum learns
from far fewer pairs; it also makes length a way to cheat. Saved as a folder:

    config.json, model.safetensors    the body, as transformers saves it
    tokenizer.json, ...               its tokenizer
    reward_head.safetensors           weight [1, hidden], bias [1]
    reward.json                       {"pooling": "sum", "mean": -3.1, "std": 2.4}: scores are (pooled - mean) / std
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from tba.tasks.tldr.sequences import Padded

Pooling = Literal["sum", "last"]
POOLINGS = ("sum", "last")
REWARD_FILE = "reward.json"
HEAD_FILE = "reward_head.safetensors"


class RewardModel(nn.Module):
    """Scores padded sequences -> float32 [N]. The head starts at zero: every response is worth the same."""

    def __init__(self, body: PreTrainedModel, *, pooling: Pooling, mean: float = 0.0, std: float = 1.0) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is not known: it may be {' or '.join(POOLINGS)}.")
        self.body, self.pooling, self.mean, self.std = body, pooling, mean, std
        self.head = nn.Linear(body.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Padded) -> Tensor:
        return (self.pooled(batch) - self.mean) / self.std

    def pooled(self, batch: Padded) -> Tensor:
        """Before it is standardised."""
        hidden = self.body(input_ids=batch.token_ids_NT, attention_mask=batch.real_NT).last_hidden_state
        if self.pooling == "last":
            return self.head(hidden[torch.arange(len(hidden)), batch.last_N].float()).squeeze(-1)
        return (self.head(hidden.float()).squeeze(-1) * batch.response_NT).sum(dim=1)

    def standardise(self, pooled_N: Tensor) -> None:
        """From now on these have mean 0 and deviation 1."""
        self.mean, self.std = float(pooled_N.mean()), float(pooled_N.std())
        if not self.std > 0:
            raise RuntimeError(
                f"the reward model gives {len(pooled_N)} responses scores of deviation {self.std}: it has learned nothing. "
                "Give more pairs, more epochs or another learning_rate."
            )

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.body.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        head = {name: tensor.detach().float().cpu().contiguous() for name, tensor in self.head.state_dict().items()}
        save_file(head, folder / HEAD_FILE)
        numbers = {"pooling": self.pooling, "mean": self.mean, "std": self.std}
        (folder / REWARD_FILE).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> RewardModel:
        """`dtype` is the body's; the head is float32."""
        numbers = _read_numbers(folder / REWARD_FILE)
        model = RewardModel(
            AutoModel.from_pretrained(folder, dtype=dtype),
            pooling=cast(Pooling, numbers["pooling"]),
            mean=float(numbers["mean"]),
            std=float(numbers["std"]),
        )
        model.head.load_state_dict(load_file(folder / HEAD_FILE))
        return model.eval()


def is_reward_model(folder: Path) -> bool:
    return (folder / REWARD_FILE).is_file()


def _read_numbers(file: Path) -> dict[str, str | float]:
    numbers = json.loads(file.read_text(encoding="utf-8"))
    missing = [name for name in ("pooling", "mean", "std") if name not in numbers]
    if missing:
        raise ValueError(
            f"{file} has no {', '.join(missing)}: it must have pooling, mean and std. Train the model anew."
        )
    return numbers
