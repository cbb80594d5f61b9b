"""Reward models, and the scores of summaries they give: ours, or any sequence classifier with one label.

    scorer = load_scorer("mnoukhov/pythia1b-rm-tldr6.9b", device="cuda")
    scorer.score(["... TL;DR:"], [" I broke my foot."], [True])   # array([3.27])

Our own reward model is the body of a causal language model and a linear head that gives every token a score. Pooling `sum`
adds up the scores of the response's tokens, EOS included; `last` takes that of the last token. A sum learns from far fewer
pairs; it also makes length a way to cheat. It is saved as a folder:

    config.json, model.safetensors    the body, as transformers saves it
    tokenizer.json, ...               its tokenizer
    reward_head.safetensors           weight [1, hidden], bias [1]
    reward.json                       {"pooling": "sum", "mean": -3.1, "std": 2.4}: scores are (pooled - mean) / std

Prompt and response are tokenised apart and their ids joined, so that token boundaries are those of a policy that read the
prompt and wrote the response. Axes: N sequences, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from tba.models.load import context_length, first_line, load_weights, resolve_device, resolve_dtype
from tba.tasks.data.prompts import encode

Pooling = Literal["sum", "last"]
POOLINGS = ("sum", "last")
REWARD_FILE = "reward.json"
HEAD_FILE = "reward_head.safetensors"


def load_scorer(path: str, *, device: str = "auto", scores_per_pass: int = 32, dtype: str = "auto") -> ModelScorer:
    """A folder with reward.json is one of ours; every other folder or hub name must be a classifier with one label."""
    disable_progress_bar()
    folder, on = Path(path).expanduser(), resolve_device(device)
    path = str(folder) if folder.is_dir() else path
    as_dtype = resolve_dtype(dtype, on)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if is_reward_model(folder):
            model: RewardModel | Classifier = RewardModel.load(folder, dtype=as_dtype)
        else:
            model = Classifier.load(path, dtype=as_dtype)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"reward model {path!r} cannot be loaded: {first_line(error).rstrip('. ')}. Give a folder that `tba prepare "
            "reward_model` wrote, or a folder or hub name of a sequence classifier with one label."
        ) from error
    return ModelScorer(model.to(on), tokenizer, scores_per_pass=scores_per_pass, context=_context(model))


def _context(model: RewardModel | Classifier) -> int | None:
    try:
        return context_length((model.body if isinstance(model, RewardModel) else model.model).config)
    except ValueError:  # a model without such a limit
        return None


class ModelScorer:
    """A reward model with its own tokenizer. No gradients, `scores_per_pass` sequences at once, those of like length."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, scores_per_pass: int, context: int | None = None
    ) -> None:
        """`context` is the longest sequence in tokens that the model can read; None = any."""
        self._model, self._tokenizer = model.eval(), tokenizer
        self._scores_per_pass, self._context = scores_per_pass, context
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def score(self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
        sequences = [self._sequence(*sample) for sample in zip(prompts, responses, finished, strict=True)]
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].token_ids))
        scores = np.zeros(len(sequences))
        for start in range(0, len(order), self._scores_per_pass):
            chosen = order[start : start + self._scores_per_pass]
            batch = pad_right([sequences[index] for index in chosen], device=self._device)
            scores[chosen] = self._model(batch).double().cpu().numpy()
        return scores

    def _sequence(self, prompt: str, response: str, finished: bool) -> Sequenced:
        sequence = make_sequence(self._tokenizer, prompt, response, finished=finished)
        if self._context is not None and len(sequence.token_ids) > self._context:
            raise ValueError(
                f"a prompt with its response has {len(sequence.token_ids)} tokens for the reward model, which reads at most "
                f"{self._context}: lower task.max_prompt_tokens or generate.max_new_tokens."
            )
        return sequence


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
        """Scores before they are standardised, float32 [N]."""
        hidden = self.body(input_ids=batch.token_ids_NT, attention_mask=batch.real_NT).last_hidden_state
        if self.pooling == "last":
            return self.head(hidden[torch.arange(len(hidden)), batch.last_N].float()).squeeze(-1)
        return (self.head(hidden.float()).squeeze(-1) * batch.response_NT).sum(dim=1)

    def standardise(self, pooled_N: Tensor) -> None:
        """Sets mean and std so that these pooled scores have mean 0 and deviation 1."""
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
            load_weights(AutoModel, str(folder), dtype=dtype),
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


class Classifier(nn.Module):
    """Scores padded sequences -> float32 [N] by the one logit of each whole sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        if model.config.num_labels != 1:
            raise ValueError(f"it has {model.config.num_labels} labels; the logit of one is the score.")
        self.model = model

    def forward(self, batch: Padded) -> Tensor:
        inputs = {"input_ids": batch.token_ids_NT, "attention_mask": batch.real_NT}
        head = getattr(self.model, "score", None)
        if head is None:  # an encoder: it looks at the mask, and knows where to read
            return self.model(**inputs).logits[:, 0].float()
        # A decoder's own forward looks for the last token that is not the padding token, and so reads before the EOS where
        # the two are the same, as in Pythia.
        hidden = self.model.base_model(**inputs).last_hidden_state
        # In float32: half precision has steps of 0.03 at a score of 4, and wins are decided by less.
        return nn.functional.linear(hidden[torch.arange(len(hidden)), batch.last_N].float(), head.weight.float())[:, 0]

    @staticmethod
    def load(path: str, *, dtype: torch.dtype) -> Classifier:
        """Loads a classifier from a folder or a hub name."""
        return Classifier(load_weights(AutoModelForSequenceClassification, path, dtype=dtype).eval())


class Sequenced(NamedTuple):
    """Sequenced(token_ids=[1, 40, 7, 9, 2], num_prompt_tokens=3)"""

    token_ids: list[int]
    num_prompt_tokens: int


def make_sequence(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, *, finished: bool) -> Sequenced:
    """The prompt has its BOS where the tokenizer puts one; the response ends with EOS if it finished and there is one."""
    prompt_ids = encode(prompt, tokenizer)
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"]
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
