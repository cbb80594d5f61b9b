"""Train a reward model from preference pairs, with the Bradley-Terry loss -log sigmoid(score of chosen - of rejected):

    train_reward_model("EleutherAI/pythia-410m", Path("pairs.jsonl"), Path("reward_model"), RewardTraining())

A pair is a prompt, the response that was preferred and the one that was not:

    {"prompt": "... TL;DR:", "chosen": "place harbour day friday", "rejected": "so day friday"}

The body starts as any causal language model; dropout is off. Weights are rounded to the dtype that they are saved in before
scores are standardised and pair accuracy is measured: the figures are those of the files.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tba.models.load import context_length, first_line, load_weights, resolve_device
from tba.observe.files import check_new_folder
from tba.tasks.data.prompts import share_of
from tba.tasks.data.rows import BadRow, BadRows, DataRow, jsonl_rows, prompt_column, require_object, text_column
from tba.tasks.tldr.reward_model import REWARD_FILE, Pooling, RewardModel, Sequenced, make_sequence, pad_right

SequencedPair = tuple[Sequenced, Sequenced]
"""Chosen and rejected response, each with its prompt."""
Batch = TypeVar("Batch")
SKIP = "--skip-bad-rows"
"""Option of `tba prepare reward_model` that leaves out bad pairs."""


@dataclass(frozen=True, kw_only=True)
class RewardTraining:
    """How a reward model is trained: learning_rate is reached after warmup_steps, then falls to 0 linearly.

    For pretrained models of some size: RewardTraining(epochs=1, learning_rate=1e-5, pairs_per_pass=8)
    """

    pooling: Pooling = "sum"
    epochs: int = 3
    batch_size: int = 64
    """Number of pairs in an optimizer step."""
    pairs_per_pass: int = 64
    """Number of pairs that go through the model at once: lower it when memory is short."""
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    max_grad_norm: float = 1.0
    held_out_fraction: float = 0.1
    """Share of the pairs, by a hash of their prompt, to measure on when no held-out file is given."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    save_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: str = "auto"
    seed: int = 0


def train_reward_model(
    base_path: str, pairs: Path, output: Path, settings: RewardTraining, *, held_out: Path | None = None
) -> dict[str, Any]:
    """Returns {"model": ..., "pairs": {...}, "accuracy": share of held-out pairs ranked as labelled, "loss": ..., ...}."""
    started = time.monotonic()
    if not 0 < settings.learning_rate <= 1:
        raise ValueError(f"learning_rate={settings.learning_rate} is not between 0 and 1: give one such as 1e-5.")
    check_new_folder(output, may_hold=REWARD_FILE)
    train, measure = _split_pairs(pairs, held_out, settings)
    tokenizer, body = _load_base(base_path)
    torch.manual_seed(settings.seed)
    model = RewardModel(body, pooling=settings.pooling).to(resolve_device(settings.device))
    context = context_length(body.config)
    trained_on, measured_on = (_sequenced(own, tokenizer, context, settings) for own in (train, measure))
    loss = _fit(model, trained_on, settings)

    model.body.to({"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.save_dtype]).float()
    chosen_N, rejected_N = pooled_scores(model, measured_on, settings)
    model.standardise(torch.cat([chosen_N, rejected_N]))
    _save(model, tokenizer, output, settings)
    return {
        "model": str(output),
        "pairs": {"train": len(train), "held_out": len(measure)},
        "accuracy": pair_accuracy(chosen_N, rejected_N),
        "loss": loss,
        "mean": model.mean,
        "std": model.std,
        "seconds": round(time.monotonic() - started, 1),
    }


def bradley_terry_loss(chosen_N: Tensor, rejected_N: Tensor) -> Tensor:
    """Mean over pairs of -log of the probability that the chosen response wins."""
    return -logsigmoid(chosen_N - rejected_N).mean()


def pair_accuracy(chosen_N: Tensor, rejected_N: Tensor) -> float:
    """Share of pairs ranked as labelled; equal scores are half right."""
    return float(((chosen_N > rejected_N).double() + 0.5 * (chosen_N == rejected_N).double()).mean())


@torch.no_grad()
def pooled_scores(
    model: RewardModel, pairs: Sequence[SequencedPair], settings: RewardTraining
) -> tuple[Tensor, Tensor]:
    """Scores of chosen and rejected responses before they are standardised, on the CPU."""
    passes = [_pooled(model, pairs[start : start + settings.pairs_per_pass])
              for start in range(0, len(pairs), settings.pairs_per_pass)]  # fmt: skip
    return torch.cat([chosen for chosen, _ in passes]).cpu(), torch.cat([rejected for _, rejected in passes]).cpu()


def _fit(model: RewardModel, pairs: Sequence[SequencedPair], settings: RewardTraining) -> float:
    """Train the model; returns the mean loss of the last epoch."""
    steps_per_epoch = math.ceil(len(pairs) / settings.batch_size)
    losses = fit(
        model,
        _batches(pairs, settings),
        lambda batch: _backward(model, batch, settings.pairs_per_pass),
        steps=steps_per_epoch * settings.epochs,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
    )
    last = losses[-steps_per_epoch:]
    return sum(last) / len(last)


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    backward: Callable[[Batch], float],
    *,
    steps: int,
    learning_rate: float,
    warmup_steps: int,
    max_grad_norm: float = 1.0,
) -> list[float]:
    """One AdamW step for each batch; returns the losses. `backward` adds the gradients of a batch and returns its loss. The
    rate is reached after warmup_steps, then falls to 0 linearly."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    losses = []
    for step, batch in enumerate(batches):
        warmup, decay = (step + 1) / max(1, warmup_steps), 1 - step / steps
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, warmup) * decay
        optimizer.zero_grad()
        losses.append(backward(batch))
        if not math.isfinite(losses[-1]):
            raise RuntimeError(f"the loss is {losses[-1]} at step {step}: lower the learning rate.")
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
    return losses


def _backward(model: RewardModel, batch: Sequence[SequencedPair], pairs_per_pass: int) -> float:
    """Gradients of the batch's mean loss, a few pairs at a time."""
    total = 0.0
    for start in range(0, len(batch), pairs_per_pass):
        part = batch[start : start + pairs_per_pass]
        loss = bradley_terry_loss(*_pooled(model, part)) * (len(part) / len(batch))
        loss.backward()
        total += loss.item()
    return total


def _pooled(model: RewardModel, pairs: Sequence[SequencedPair]) -> tuple[Tensor, Tensor]:
    sequences = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    scores = model.pooled(pad_right(sequences, device=model.head.weight.device))
    return scores[: len(pairs)], scores[len(pairs) :]


def _batches(pairs: Sequence[SequencedPair], settings: RewardTraining) -> Iterator[list[SequencedPair]]:
    rng = random.Random(settings.seed)
    for _ in range(settings.epochs):
        order = rng.sample(range(len(pairs)), len(pairs))
        for start in range(0, len(order), settings.batch_size):
            yield [pairs[index] for index in order[start : start + settings.batch_size]]


def _split_pairs(path: Path, held_out: Path | None, settings: RewardTraining) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and pairs to measure on. All pairs of a prompt fall on one side."""
    pairs = read_pairs(path, on_bad_row=settings.on_bad_row)
    if held_out is not None:
        return pairs, read_pairs(held_out, on_bad_row=settings.on_bad_row)
    kept = [pair for pair in pairs if share_of(pair.prompt) >= settings.held_out_fraction]
    measured = [pair for pair in pairs if share_of(pair.prompt) < settings.held_out_fraction]
    if not kept or len(measured) < 2:
        raise ValueError(
            f"held_out_fraction={settings.held_out_fraction} leaves {len(kept)} of {len(pairs)} pairs to train on and "
            f"{len(measured)} to measure on: give more pairs, or a file of pairs to measure on (--held-out)."
        )
    return kept, measured


def _sequenced(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, context: int, settings: RewardTraining
) -> list[SequencedPair]:
    bad = BadRows(settings.on_bad_row, skip_by=SKIP)

    def sequenced(pair: Pair) -> SequencedPair:
        both = [make_sequence(tokenizer, pair.prompt, text, finished=True) for text in (pair.chosen, pair.rejected)]
        longest = max(len(sequence.token_ids) for sequence in both)
        if longest > context:
            raise BadRow("over-long pair", f"{pair.place}: {longest} tokens, beyond the model's context of {context}.")
        return both[0], both[1]

    kept = bad.keep(pairs, sequenced)
    bad.report()
    if not kept:
        raise ValueError(f"no pair fits the model's context of {context} tokens: give shorter ones.")
    return kept


def _load_base(path: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    try:
        return AutoTokenizer.from_pretrained(path), load_weights(AutoModel, path, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model {path!r} cannot be loaded: {first_line(error).rstrip('. ')}. Give a folder or hub name of a causal "
            "language model."
        ) from error


def _save(model: RewardModel, tokenizer: PreTrainedTokenizerBase, output: Path, settings: RewardTraining) -> None:
    if settings.save_dtype == "bfloat16":
        model.body.to(torch.bfloat16)
    output.mkdir(parents=True, exist_ok=True)
    model.save(output, tokenizer)


class Pair(NamedTuple):
    """Two responses to one prompt, both of which ended by themselves."""

    prompt: str
    chosen: str
    rejected: str
    place: str = ""
    """Place where the pair was read: `pairs.jsonl line 17`."""
    line: int = 0


def read_pairs(path: Path, *, on_bad_row: Literal["stop", "skip"] = "stop") -> list[Pair]:
    """The good rows of a JSONL file (also .gz)."""
    if not path.is_file():
        raise ValueError(f"pairs: file {path} does not exist. Give JSONL rows with `prompt`, `chosen` and `rejected`.")
    bad = BadRows(on_bad_row, skip_by=SKIP)
    pairs = bad.keep(jsonl_rows(path, bad), read_pair)
    bad.report()
    if not pairs:
        raise ValueError(f"pairs: file {path} has no usable row, {bad.total} are bad.")
    return pairs


def read_pair(row: DataRow) -> Pair:
    require_object(row, columns="a `prompt`, a `chosen` and a `rejected` response")
    chosen, rejected = _response(row, "chosen"), _response(row, "rejected")
    if chosen == rejected:
        raise BadRow("no preference", f"{row.place}: `chosen` and `rejected` are the same.")
    return Pair(
        prompt=prompt_column(row, "prompt"),
        chosen=chosen,
        rejected=rejected,
        place=row.place,
        line=row.line,
    )


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    rows = ({"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _response(row: DataRow, column: str) -> str:
    """Response as it stands, with the space before it that a tokenizer may need."""
    text = text_column(row, column)
    if not text.strip():
        raise BadRow("empty response", f"{row.place}: `{column}` is empty.")
    return text
