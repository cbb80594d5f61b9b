"""Shapes of models, and the responses that they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BYTES_PER_SECOND = 4.8e12
"""Of an H200's memory."""
FLOPS = 790e12
"""bf16 matrix products as measured on an H200."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; it is printed when it is made, so that a run that is cut off has said what it knew."""

    work: str
    figure: str
    limit: str = ""

    def __post_init__(self) -> None:
        print(f"{self.work}: {self.figure}  [{self.limit or 'no limit stated'}]", flush=True)


def print_table(rows: Sequence[Row], title: str) -> None:
    print(f"\n{title}\n\n| work | figure | limit |\n|---|---|---|")
    for row in rows:
        print(f"| {row.work} | {row.figure} | {row.limit} |")


# --- shapes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a real model's config."""

    name: str
    model_type: str
    config: dict[str, Any]
    checked_layers: int
    """Number of layers with which it is checked in fp32."""

    def numbers(self, layers: int | None = None) -> dict[str, Any]:
        """The config, with another number of layers where one is given."""
        return self.config | ({} if layers is None else {"num_hidden_layers": layers})

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def matrix_parameters(self) -> int:
        """Parameters that every token is multiplied with: those of the layers and of the head."""
        c = self.config
        head_dim = c["hidden_size"] // c["num_attention_heads"]
        attention = c["hidden_size"] * head_dim * 2 * (c["num_attention_heads"] + c["num_key_value_heads"])
        layer = attention + 3 * c["hidden_size"] * c["intermediate_size"]
        return int(c["num_hidden_layers"] * layer + c["vocab_size"] * c["hidden_size"])

    @property
    def bytes_per_key(self) -> int:
        """Keys and values of one position in bf16."""
        c = self.config
        head_dim = c["hidden_size"] // c["num_attention_heads"]
        return int(4 * c["num_hidden_layers"] * c["num_key_value_heads"] * head_dim)


LONGEST = 8960
"""Most positions of a sequence here; a multiple of every page and key size."""
SHAPES = {
    "0.5B": Shape(
        name="0.5B Qwen2.5",
        model_type="qwen2",
        checked_layers=3,
        config={
            "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": LONGEST,
            "tie_word_embeddings": True, "rope_theta": 1e6,
        },
    ),
    "1.1B": Shape(
        name="1.1B Llama",
        model_type="llama",
        checked_layers=3,
        config={
            "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
            "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": LONGEST,
            "tie_word_embeddings": False, "rope_theta": 1e4,
        },
    ),
    "7B": Shape(
        name="7B Qwen2.5",
        model_type="qwen2",
        checked_layers=2,
        config={
            "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": LONGEST,
            "tie_word_embeddings": False, "rope_theta": 1e6,
        },
    ),
}  # fmt: skip


# --- workloads ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts of random tokens, each to be continued by some samples.

    Workload(name="shared", slots=256, prompts=32, prompt_tokens=128, samples=8, new_tokens=128)
    """

    name: str
    slots: int
    """Most responses at work at once."""
    prompts: int
    prompt_tokens: int
    samples: int
    new_tokens: int
    """Tokens of each response; of the longest, where `fewest_tokens` is given."""
    fewest_tokens: int | None = None
    """Responses have between this and `new_tokens` tokens, uniformly; None = all have `new_tokens`."""

    @property
    def title(self) -> str:
        lengths = f"{self.prompt_tokens} + "
        lengths += (
            f"{self.new_tokens}" if self.fewest_tokens is None else f"({self.fewest_tokens} to {self.new_tokens})"
        )
        work = f"{self.prompts} prompts" + (f" x {self.samples}" if self.samples > 1 else "")
        return f"{work}, {lengths} tokens, {self.slots} slots"

    @property
    def max_length(self) -> int:
        return self.prompt_tokens + self.new_tokens

    def lengths(self) -> np.ndarray:
        """Number of new tokens of each prompt's responses."""
        if self.fewest_tokens is None:
            return np.full(self.prompts, self.new_tokens)
        return np.random.default_rng(1).integers(self.fewest_tokens, self.new_tokens + 1, self.prompts)

    def token_ids(self, vocabulary: int, repeat: int) -> np.ndarray:
        """Prompts int32 [prompts, prompt_tokens]; others in every repeat, so that no cache of prefixes has seen them."""
        rng = np.random.default_rng(1000 + repeat)
        return rng.integers(10, vocabulary, (self.prompts, self.prompt_tokens)).astype(np.int32)

    def limits(self, shape: Shape) -> tuple[float, float]:
        """Tokens/s if decode steps with all slots at work did nothing but read the weights and each prompt's keys once, or
        the products at full rate where those take longer; and the same behind a prefill at full rate."""
        tokens = float(self.lengths().sum()) * self.samples
        own = tokens / (self.prompts * self.samples) / 2
        # Samples of one prompt that are at work together can read its keys in one pass.
        prompts_at_work = min(self.prompts, -(-self.slots // self.samples))
        keys = shape.bytes_per_key * (self.slots * own + prompts_at_work * self.prompt_tokens)
        step = max(
            (2 * shape.matrix_parameters + keys) / BYTES_PER_SECOND, 2 * shape.matrix_parameters * self.slots / FLOPS
        )
        decode = tokens / self.slots * step
        head = shape.config["vocab_size"] * shape.config["hidden_size"]
        layers = 2.0 * (shape.matrix_parameters - head)
        # Queries and keys, weights and values: 4 x width of a layer for each pair of positions, half of which are seen.
        pairs = 2.0 * shape.config["num_hidden_layers"] * shape.config["hidden_size"] * self.prompt_tokens
        prefill = self.prompts * self.prompt_tokens * (layers + pairs) / FLOPS
        return tokens / decode, tokens / (decode + prefill)


def _workloads(*found: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in found}


WORKLOADS = _workloads(
    Workload(name="256", slots=256, prompts=256, prompt_tokens=128, samples=1, new_tokens=128),
    Workload(name="shared", slots=256, prompts=32, prompt_tokens=128, samples=8, new_tokens=128),
    Workload(name="ragged", slots=256, prompts=1024, prompt_tokens=128, samples=1, new_tokens=320, fewest_tokens=32),
    Workload(name="1k", slots=256, prompts=256, prompt_tokens=512, samples=1, new_tokens=512),
    Workload(name="2k", slots=64, prompts=64, prompt_tokens=1536, samples=1, new_tokens=512),
    Workload(name="8k", slots=32, prompts=32, prompt_tokens=7680, samples=1, new_tokens=512),
    Workload(name="8k-shared", slots=64, prompts=16, prompt_tokens=8192, samples=8, new_tokens=512),
)
