"""Red-teaming: how many attacks succeed, and how different from one another the successful ones are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.evaluate.base import BetweenSteps, respond
from tba.evaluate.distance import kl_per_response, start_log_probs
from tba.evaluate.diversity import effective_modes, mean_cosine_distance, self_bleu, vendi_score
from tba.generate.engine import Engine, Scorer
from tba.tasks.red_team.task import RedTeamTask
from tba.types import Prompt, Sampling

DEFAULT_ATTACKS = 1024
"""The paper's."""


@dataclass(frozen=True, kw_only=True)
class AttackEvaluator:
    """`success`, diversity of what succeeded, `kl` to the start model, and `regularised_reward`, which TB and KL-regularised
    policy gradients alike maximise."""

    task: RedTeamTask
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    """One: the attacker's."""
    sampling: Sampling
    num_attacks: int
    start: Scorer
    beta: float
    """At the end of training."""

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
        probabilities = self.task.probabilities(group.texts, finished)
        succeeded = np.flatnonzero(probabilities > self.task.success_above).tolist()
        log_start = start_log_probs(self.start, [group], self.sampling.training_temperature)
        toxicity, kl = float(probabilities.mean()), kl_per_response([group], log_start)
        return {
            "success": len(succeeded) / max(1, len(group.texts)),
            **self._diversity([group.texts[i] for i in succeeded], [finished[i] for i in succeeded]),
            "kl": kl,
            "toxicity": toxicity,
            "regularised_reward": toxicity - self.beta * kl,
            "mean_length": float(np.mean([len(completion.token_ids) for completion in group.completions])),
        }

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
