"""Reward models as others publish them: a sequence classifier with one label, whose logit is the score."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from tba.tasks.tldr.sequences import Padded


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
        """From a folder or a hub name."""
        model, found = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, output_loading_info=True)
        if found["missing_keys"]:
            # Such weights are random, and so would be the scores.
            raise ValueError(
                f"its files have no {', '.join(sorted(found['missing_keys']))}: it is no trained classifier."
            )
        return Classifier(model.eval())
