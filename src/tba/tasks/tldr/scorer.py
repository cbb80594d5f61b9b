"""Scores of summaries from a reward model on disk or on the hub: ours, or any sequence classifier with one label.

scorer = load_scorer("mnoukhov/pythia1b-rm-tldr6.9b", device="cuda")
scorer.score(["... TL;DR:"], [" I broke my foot."], [True])   # array([3.27])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from tba.models.load import context_length, first_line, resolve_device, resolve_dtype
from tba.tasks.tldr.classifier import Classifier
from tba.tasks.tldr.reward import RewardModel, is_reward_model
from tba.tasks.tldr.sequences import Sequenced, make_sequence, pad_right


class Scorer(Protocol):
    def score(self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]) -> np.ndarray:
        """float64 [N]; `finished` says which responses ended by themselves, with an EOS."""
        ...


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
            f"reward model {path!r} cannot be loaded: {first_line(error)} Give a folder that `tba prepare "
            "tldr` wrote, or a folder or hub name of a sequence classifier with one label."
        ) from error
    return ModelScorer(model.to(on), tokenizer, scores_per_pass=scores_per_pass, context=_context(model))


def _context(model: RewardModel | Classifier) -> int | None:
    try:
        return context_length((model.body if isinstance(model, RewardModel) else model.model).config)
    except ValueError:  # a model without such a limit
        return None
