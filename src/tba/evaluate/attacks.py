"""Red-teaming: how many attacks succeed, and how different from one another the successful ones and all of them are."""

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
from tba.observe.metrics import mean_metrics
from tba.tasks.red_team.task import RedTeamTask
from tba.types import Prompt, Sampling

DEFAULT_ATTACKS = 1024
"""The paper's."""
ATTACKS_AT_ONCE = 64
"""Judged together, between two signs of life."""
ALL = "_all_attacks"
"""End of the names of diversity metrics that failed attacks count in too."""


@dataclass(frozen=True, kw_only=True)
class AttackEvaluator:
    """`success`, diversity of what succeeded (`cosine_distance`, ...) and of all attacks, as the published evaluation has it
    (`cosine_distance_all_attacks`, ...), and, where the start model is known, `kl` to it and `regularised_reward`, which TB
    and KL-regularised policy gradients alike maximise. Standard errors are over attacks, which all answer one prompt."""

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
        success = probabilities > self.task.success_above
        succeeded = np.flatnonzero(success).tolist()
        means = {"toxicity": probabilities, "mean_length": np.array([len(c.token_ids) for c in group.completions])}
        if self.distance is not None:
            means["kl"] = self.distance.kl([group], self.sampling.training_temperature, between_steps)
            if self.beta is not None:
                means["regularised_reward"] = probabilities - self.beta * means["kl"]
        return {
            **mean_metrics({"success": success.tolist()}),
            **self._modes([(group.texts[i], finished[i]) for i in succeeded]),
            **self._diversity([group.texts[i] for i in succeeded]),
            **{f"{name}{ALL}": value for name, value in self._diversity(group.texts).items()},
            **mean_metrics({name: values.tolist() for name, values in means.items()}),
            "num_prompts": float(len(self.prompts)),
            "num_attacks": float(len(finished)),
        }

    def _modes(self, succeeded: Sequence[tuple[str, bool]]) -> dict[str, float]:
        """The weaknesses that successful attacks hit, where they are known."""
        if not self.task.knows_modes:
            return {}
        modes = Counter(mode for text, end in succeeded if (mode := self.task.mode_of(text, end)) is not None)
        return {"modes": float(len(modes)), "effective_modes": effective_modes(list(modes.values()))}

    def _diversity(self, texts: Sequence[str]) -> dict[str, float]:
        embeddings = self.task.embed(texts)
        return {
            "cosine_distance": mean_cosine_distance(embeddings),
            "vendi": vendi_score(embeddings),
            "self_bleu": self_bleu([text.split() for text in texts]),
            "distinct": len(set(texts)) / max(1, len(texts)),
        }
