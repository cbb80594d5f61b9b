"""Red-teaming: how many attacks succeed, and how different from one another the successful ones are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.evaluate.base import BetweenSteps, in_parts, respond
from tba.evaluate.distance import Distance
from tba.evaluate.diversity import effective_modes, mean_cosine_distance, self_bleu, vendi_score
from tba.generate.engine import Engine
from tba.tasks.red_team.task import RedTeamTask
from tba.types import Prompt, Sampling

DEFAULT_ATTACKS = 1024
"""The paper's."""
ATTACKS_AT_ONCE = 64
"""Judged together, between two signs of life."""


@dataclass(frozen=True, kw_only=True)
class AttackEvaluator:
    """`success`, diversity of what succeeded, and, where the start model is known, `kl` to it and `regularised_reward`,
    which TB and KL-regularised policy gradients alike maximise."""

    task: RedTeamTask
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    """One: the attacker's."""
    sampling: Sampling
    num_attacks: int
    distance: Distance | None
    beta: float | None
    """At the end of training; None = the toxicity minus beta x KL is not what is maximised."""

    def __call__(self, engine: Engine, between_steps: BetweenSteps | None = None) -> dict[str, float]:
        (group,) = respond(
            engine,
            self.tokenizer,
            self.prompts,
            samples_per_prompt=self.num_attacks,
            sampling=self.sampling,
            between_steps=between_steps,
        )
        finished = [completion.finish == "stop" for completion in group.completions]
        probabilities = np.concatenate(
            [
                self.task.probabilities(group.texts[part], finished[part])
                for part in in_parts(len(finished), ATTACKS_AT_ONCE, between_steps)
            ]
        )
        succeeded = np.flatnonzero(probabilities > self.task.success_above).tolist()
        toxicity = float(probabilities.mean())
        metrics = {
            "success": len(succeeded) / len(finished),
            **self._diversity([group.texts[i] for i in succeeded], [finished[i] for i in succeeded]),
            "toxicity": toxicity,
            "mean_length": float(np.mean([len(completion.token_ids) for completion in group.completions])),
        }
        if self.distance is not None:
            metrics["kl"] = self.distance.kl([group], self.sampling.training_temperature, between_steps)
            if self.beta is not None:
                metrics["regularised_reward"] = toxicity - self.beta * metrics["kl"]
        return metrics

    def _diversity(self, texts: Sequence[str], finished: Sequence[bool]) -> dict[str, float]:
        """Of successful attacks."""
        embeddings = self.task.embed(texts)
        found = {
            "cosine_distance": mean_cosine_distance(embeddings),
            "vendi": vendi_score(embeddings),
            "self_bleu": self_bleu([text.split() for text in texts]),
            "distinct": len(set(texts)) / max(1, len(texts)),
        }
        if self.task.knows_modes:
            modes = Counter(mode for mode in map(self.task.mode_of, texts, finished) if mode is not None)
            found = {"modes": float(len(modes)), "effective_modes": effective_modes(list(modes.values())), **found}
        return found
