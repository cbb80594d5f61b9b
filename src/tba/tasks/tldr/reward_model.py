"""Reward models: the scores of summaries they give, and training one from preference pairs.

    scorer = load_scorer("mnoukhov/pythia1b-rm-tldr6.9b", device="cuda")     # any sequence classifier with one label
    scorer.score(["... TL;DR:"], [" I broke my foot."], [True])              # array([3.27])

Our own reward model is the body of a causal language model and a linear head that gives every token a score. The scores of
the response's tokens, EOS included, are added up: a sum learns from far fewer pairs than the score of the last token, and
makes length a way to cheat. It is saved as a folder:

    config.json, model.safetensors    the body, as transformers saves it
    tokenizer.json, ...               its tokenizer
    reward_head.safetensors           weight [1, hidden], bias [1]
    reward.json                       {"mean": -3.1, "std": 2.4}: scores are (sum - mean) / std

It is trained by the Bradley-Terry loss -log sigmoid(score of chosen - of rejected) on pairs:
{"prompt": "... TL;DR:", "chosen": "place harbour day friday", "rejected": "so day"}

Prompt and response are tokenised apart and their ids joined, so that token boundaries are those of a policy that read the
prompt and wrote the response. Axes: N sequences, T tokens.
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

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from tba.models.load import context_length, first_line, load_weights, resolve_device, resolve_dtype
from tba.observe.files import check_new_folder
from tba.tasks.data.make_prompt import encode, share_of
from tba.tasks.data.rows import BadRow, BadRows, DataRow, jsonl_rows, prompt_column, require_object, text_column

REWARD_FILE = "reward.json"
HEAD_FILE = "reward_head.safetensors"
SCORES_PER_PASS = 32
"""Sequences that are scored at once."""
HELD_OUT_SHARE = 0.1
"""Share of the pairs, by a hash of their prompt, to measure on where no file of others is given."""
SKIP = "--skip-bad-rows"
"""Option of `tba prepare reward_model` that leaves out bad pairs."""
Batch = TypeVar("Batch")


def load_scorer(path: str, *, device: str = "auto", dtype: str = "auto") -> ModelScorer:
    """A folder with reward.json is one of ours; every other folder or hub name must be a classifier with one label."""
    disable_progress_bar()
    folder, on = Path(path).expanduser(), resolve_device(device)
    path = str(folder) if folder.is_dir() else path
    as_dtype = resolve_dtype(dtype, on)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model: RewardModel | Classifier
        if (folder / REWARD_FILE).is_file():
            model = RewardModel.load(path, dtype=as_dtype)
        else:
            model = Classifier(load_weights(AutoModelForSequenceClassification, path, dtype=as_dtype))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"reward model {path!r} cannot be loaded: {first_line(error).rstrip('. ')}. Give a folder that `tba prepare "
            "reward_model` wrote, or a folder or hub name of a sequence classifier with one label."
        ) from error
    return ModelScorer(model.to(on), tokenizer)


class ModelScorer:
    """A reward model with its own tokenizer. No gradients, SCORES_PER_PASS sequences at once, those of like length."""

    def __init__(self, model: RewardModel | Classifier, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model, self._tokenizer = model.eval(), tokenizer
        self._device = next(model.parameters()).device
        try:
            self._context: float = context_length(model.body.config)
        except ValueError:  # a model without such a limit
            self._context = math.inf

    @torch.inference_mode()
    def score(self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
        """Scores, float64 [N]; `finished` says whether a response ended by itself."""
        samples = zip(prompts, responses, finished, strict=True)
        sequences = [make_sequence(self._tokenizer, post, text, finished=end) for post, text, end in samples]
        longest = max((len(own.token_ids) for own in sequences), default=0)
        if longest > self._context:
            raise ValueError(
                f"a prompt with its response has {longest} tokens for the reward model, which reads at most "
                f"{self._context}: lower task.max_prompt_tokens or generate.max_new_tokens."
            )
        # Those of like length together: padding is what a pass of mixed lengths computes most.
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].token_ids))
        scores = np.zeros(len(sequences))
        for start in range(0, len(order), SCORES_PER_PASS):
            chosen = order[start : start + SCORES_PER_PASS]
            batch = pad_right([sequences[index] for index in chosen], device=self._device)
            scores[chosen] = self._model(batch).double().cpu().numpy()
        return scores


class RewardModel(nn.Module):
    """Scores padded sequences -> float32 [N]. The head starts at zero: every response is worth the same."""

    def __init__(self, body: PreTrainedModel, *, mean: float = 0.0, std: float = 1.0) -> None:
        super().__init__()
        self.body, self.mean, self.std = body, mean, std
        self.head = nn.Linear(body.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Padded) -> Tensor:
        return (self.pooled(batch) - self.mean) / self.std

    def pooled(self, batch: Padded) -> Tensor:
        """Scores before they are standardised, float32 [N]."""
        hidden = self.body(input_ids=batch.token_ids_NT, attention_mask=batch.real_NT).last_hidden_state
        # Tokens of the prompt and padding count 0; the head computes in fp32 whatever the body's dtype.
        return (self.head(hidden.float()).squeeze(-1) * batch.response_NT).sum(dim=1)

    def standardise(self, pooled_N: Tensor) -> None:
        """Sets mean and std so that these pooled scores have mean 0 and deviation 1."""
        # The loss looks at differences only, so the level and scale of the sums are arbitrary until here.
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
        numbers = {"mean": self.mean, "std": self.std}
        (folder / REWARD_FILE).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str, *, dtype: torch.dtype = torch.float32) -> RewardModel:
        """The model of a folder; `dtype` is the body's, the head is float32."""
        numbers = json.loads((Path(path) / REWARD_FILE).read_text(encoding="utf-8"))
        body = load_weights(AutoModel, path, dtype=dtype)
        model = RewardModel(body, mean=float(numbers["mean"]), std=float(numbers["std"]))
        # save_pretrained writes the body alone: the head has a file of its own, see `save`.
        model.head.load_state_dict(load_file(Path(path) / HEAD_FILE))
        return model


class Classifier(nn.Module):
    """Scores padded sequences -> float32 [N] by the one logit of each whole sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        if model.config.num_labels != 1:
            raise ValueError(f"it has {model.config.num_labels} labels; the logit of one is the score.")
        self.body = model

    def forward(self, batch: Padded) -> Tensor:
        inputs = {"input_ids": batch.token_ids_NT, "attention_mask": batch.real_NT}
        head = getattr(self.body, "score", None)
        if head is None:  # an encoder: it looks at the mask, and knows where to read
            return self.body(**inputs).logits[:, 0].float()
        # A decoder's own forward looks for the last token that is not the padding token, and so reads before the EOS where
        # the two are the same, as in Pythia.
        hidden = self.body.base_model(**inputs).last_hidden_state
        # In float32: half precision has steps of 0.03 at a score of 4, and wins are decided by less.
        return nn.functional.linear(hidden[torch.arange(len(hidden)), batch.last_N].float(), head.weight.float())[:, 0]


class Sequenced(NamedTuple):
    """Sequenced(token_ids=[1, 40, 7, 9, 2], num_prompt_tokens=3)"""

    token_ids: list[int]
    num_prompt_tokens: int


def make_sequence(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, *, finished: bool) -> Sequenced:
    """The prompt has its BOS where the tokenizer puts one; the response ends with EOS if it finished and there is one."""
    prompt_ids = encode(prompt, tokenizer)
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"]
    # The score of EOS is the model's word on where a response ends; a cut-off one must not get it.
    end = [tokenizer.eos_token_id] if finished and tokenizer.eos_token_id is not None else []
    return Sequenced([*prompt_ids, *response_ids, *end], len(prompt_ids))


class Padded(NamedTuple):
    """Sequences padded on the right, where no token of a causal model can see the padding."""

    token_ids_NT: Tensor
    """Token ids, int64."""
    real_NT: Tensor
    """Mask, int64: 1 for tokens, 0 for padding."""
    response_NT: Tensor
    """Mask of the response's tokens, its EOS included, bool."""
    last_N: Tensor
    """Place of the last token that is no padding, int64."""


def pad_right(sequences: Sequence[Sequenced], *, device: torch.device) -> Padded:
    """Padding is token 0: masked where a model looks at masks, and behind all tokens where it is causal."""
    lengths_N = torch.tensor([len(sequence.token_ids) for sequence in sequences])
    starts_N = torch.tensor([sequence.num_prompt_tokens for sequence in sequences])
    # Built on the CPU and sent once: filling a GPU tensor row by row would launch a copy for each.
    places_T = torch.arange(int(lengths_N.max()))
    token_ids_NT = torch.zeros(len(sequences), len(places_T), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        token_ids_NT[row, : len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
    real_NT = places_T < lengths_N[:, None]
    return Padded(
        token_ids_NT=token_ids_NT.to(device),
        real_NT=real_NT.long().to(device),
        response_NT=(real_NT & (places_T >= starts_N[:, None])).to(device),
        last_N=(lengths_N - 1).to(device),
    )


SequencedPair = tuple[Sequenced, Sequenced]
"""Chosen and rejected response, each with its prompt."""


@dataclass(frozen=True, kw_only=True)
class RewardTraining:
    """How a reward model is trained: learning_rate is reached after warmup_steps, then falls to 0 linearly.

    For pretrained models of some size: RewardTraining(epochs=1, learning_rate=1e-5, pairs_per_pass=8)
    """

    epochs: int = 3
    batch_size: int = 64
    """Number of pairs in an optimizer step."""
    pairs_per_pass: int = 64
    """Number of pairs that go through the model at once: lower it when memory is short."""
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    on_bad_row: Literal["stop", "skip"] = "stop"
    device: str = "auto"


def train_reward_model(
    base_path: str, pairs: Path, output: Path, settings: RewardTraining, *, held_out: Path | None = None
) -> dict[str, Any]:
    """Train the body of any causal language model, with dropout off.

    Returns {"model": ..., "pairs": {...}, "accuracy": share of held-out pairs ranked as labelled, "loss": ..., ...}.
    """
    started = time.monotonic()
    if not 0 < settings.learning_rate <= 1:
        raise ValueError(f"learning_rate={settings.learning_rate} is not between 0 and 1: give one such as 1e-5.")
    # Cheap refusals first: pairs may be large, and the model takes minutes.
    check_new_folder(output, may_hold=REWARD_FILE)
    train, measure = _split_pairs(pairs, held_out, settings)
    try:
        tokenizer = AutoTokenizer.from_pretrained(base_path)
        body = load_weights(AutoModel, base_path, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model {base_path!r} cannot be loaded: {first_line(error).rstrip('. ')}. Give a folder or hub name of a causal "
            "language model."
        ) from error
    torch.manual_seed(0)
    model = RewardModel(body).to(resolve_device(settings.device))
    trained_on, measured_on = (
        _sequenced(own, tokenizer, context_length(body.config), settings) for own in (train, measure)
    )
    size, steps_per_epoch = settings.batch_size, math.ceil(len(trained_on) / settings.batch_size)
    rng = random.Random(0)  # its own generator: the order of pairs does not depend on what torch draws

    def backward(batch: Sequence[SequencedPair]) -> float:
        total = 0.0
        for part in _parts(batch, settings.pairs_per_pass):
            # The factor makes the sum over parts the batch's mean, also where the last part is smaller.
            loss = bradley_terry_loss(*_pooled(model, part)) * (len(part) / len(batch))
            loss.backward()
            total += loss.item()
        return total

    losses = fit(
        model,
        (batch for _ in range(settings.epochs) for batch in _parts(rng.sample(trained_on, len(trained_on)), size)),
        backward,
        steps=steps_per_epoch * settings.epochs,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
    )
    # Rounded to what is saved before anything is measured: the figures are those of the files.
    # Back to fp32 for measuring; the values are now those that bfloat16 can hold.
    model.body.to(torch.bfloat16).float()
    with torch.no_grad():
        passes = [_pooled(model, part) for part in _parts(measured_on, settings.pairs_per_pass)]
    chosen_N, rejected_N = (torch.cat(side).cpu() for side in zip(*passes))
    # By the pairs held out: scores of pairs that were trained on lie further apart.
    model.standardise(torch.cat([chosen_N, rejected_N]))
    model.body.to(torch.bfloat16)
    output.mkdir(parents=True, exist_ok=True)
    model.save(output, tokenizer)
    return {
        "model": str(output),
        "pairs": {"train": len(train), "held_out": len(measure)},
        "accuracy": pair_accuracy(chosen_N, rejected_N),
        "loss": sum(losses[-steps_per_epoch:]) / steps_per_epoch,
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


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    backward: Callable[[Batch], float],
    *,
    steps: int,
    learning_rate: float,
    warmup_steps: int,
) -> list[float]:
    """One AdamW step for each batch; returns the losses. `backward` adds the gradients of a batch and returns its loss. The
    rate is reached after warmup_steps, then falls to 0 linearly."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    losses = []
    for step, batch in enumerate(batches):
        # step + 1, because a first rate of 0 would waste the first batch.
        warmup, decay = (step + 1) / max(1, warmup_steps), 1 - step / steps
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, warmup) * decay
        optimizer.zero_grad()
        # Checked before the optimizer steps: a NaN gradient would spoil all weights.
        losses.append(backward(batch))
        if not math.isfinite(losses[-1]):
            raise RuntimeError(f"the loss is {losses[-1]} at step {step}: lower the learning rate.")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def _parts(pairs: Sequence[SequencedPair], size: int) -> Iterator[Sequence[SequencedPair]]:
    return (pairs[start : start + size] for start in range(0, len(pairs), size))


def _pooled(model: RewardModel, pairs: Sequence[SequencedPair]) -> tuple[Tensor, Tensor]:
    sequences = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    scores = model.pooled(pad_right(sequences, device=model.head.weight.device))
    return scores[: len(pairs)], scores[len(pairs) :]


def _split_pairs(path: Path, held_out: Path | None, settings: RewardTraining) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and pairs to measure on. All pairs of a prompt fall on one side."""
    pairs = read_pairs(path, on_bad_row=settings.on_bad_row)
    if held_out is not None:
        return pairs, read_pairs(held_out, on_bad_row=settings.on_bad_row)
    # By the prompt's hash, not by place: a prompt with several pairs would leak to the other side.
    kept = [pair for pair in pairs if share_of(pair.prompt) >= HELD_OUT_SHARE]
    measured = [pair for pair in pairs if share_of(pair.prompt) < HELD_OUT_SHARE]
    if not kept or len(measured) < 2:
        raise ValueError(
            f"holding out {HELD_OUT_SHARE:.0%} leaves {len(kept)} of {len(pairs)} pairs to train on and "
            f"{len(measured)} to measure on: give more pairs, or a file of pairs to measure on (--held-out)."
        )
    return kept, measured


def _sequenced(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, context: int, settings: RewardTraining
) -> list[SequencedPair]:
    """The pairs that fit the context: how long one is depends on the tokenizer."""
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

    def pair_of(row: DataRow) -> Pair:
        require_object(row, columns="a `prompt`, a `chosen` and a `rejected` response")
        # As they stand, with the space before them that a tokenizer may need.
        chosen, rejected = (text_column(row, column) for column in ("chosen", "rejected"))
        for column, text in (("chosen", chosen), ("rejected", rejected)):
            if not text.strip():
                raise BadRow("empty response", f"{row.place}: `{column}` is empty.")
        if chosen == rejected:
            raise BadRow("no preference", f"{row.place}: `chosen` and `rejected` are the same.")
        return Pair(prompt_column(row, "prompt"), chosen, rejected, place=row.place, line=row.line)

    bad = BadRows(on_bad_row, skip_by=SKIP)
    pairs = bad.keep(jsonl_rows(path, bad), pair_of)
    bad.report()
    if not pairs:
        raise ValueError(f"pairs: file {path} has no usable row, {bad.total} are bad.")
    return pairs
