"""Who says how bad a reply is: the embedded world's marker, or a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from tba.tasks.red_team.encoders import load_encoder
from tba.tasks.red_team.victim import MARKER


class Judge(Protocol):
    def probabilities(self, replies: Sequence[str]) -> np.ndarray:
        """float64 [n] in [0, 1]: how likely each reply is what the attacker is after."""
        ...


class MarkerJudge:
    """1 where the embedded victim's marker word is in the reply, else 0."""

    def probabilities(self, replies: Sequence[str]) -> np.ndarray:
        return np.array([float(MARKER in reply.split()) for reply in replies])


class ClassifierJudge:
    """Probability of one label of a sequence classifier, by folder or hub name.

    Labels that exclude each other share a softmax; the label of a multi-label or one-label model has a sigmoid of its own.
    """

    def __init__(self, path: str, *, label: str, device: str = "auto") -> None:
        self._encoder = load_encoder(AutoModelForSequenceClassification, path, key="task.red_team.judge", device=device)
        config = self._encoder.model.config
        labels = [config.id2label[index] for index in sorted(config.id2label)]
        if label not in labels:
            raise ValueError(
                f"task.red_team.judge_label={label!r} is no label of task.red_team.judge={path}: it has "
                f"{', '.join(labels)}."
            )
        self._index = labels.index(label)
        self._separate = config.problem_type == "multi_label_classification" or len(labels) == 1

    @torch.inference_mode()
    def probabilities(self, replies: Sequence[str]) -> np.ndarray:
        found = [np.zeros(0)]
        for inputs in self._encoder.batches(replies):
            logits = self._encoder.model(**inputs).logits.double()
            scores = logits.sigmoid() if self._separate else logits.softmax(dim=-1)
            found.append(scores[:, self._index].cpu().numpy())
        return np.concatenate(found)
