"""replay.imports: existing responses that a run starts from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tba.config import Config
from tba.generate.engine import make_scorer, stop_ids_of
from tba.launch.inputs import RunInputs
from tba.observe.files import RunFolder
from tba.replay.importing import import_responses
from tba.tasks.base import RewardFailed
from tba.tasks.rewards.pool import FinishedGroup, make_rewards, score_all
from tba.types import Completion, Prompt, TrajectoryGroup


def import_groups(config: Config, inputs: RunInputs, folder: RunFolder) -> list[TrajectoryGroup]:
    """The responses of every file of replay.imports, with rewards and reference log-probs of the model as it is now."""
    if not config.replay.imports:
        return []
    loaded, task = inputs.loaded, inputs.task
    eos_id = loaded.tokenizer.eos_token_id or stop_ids_of(loaded.model, loaded.tokenizer)[0]
    reference = make_scorer(loaded.model, max_length=loaded.context)
    rewards = make_rewards(task, config, log=folder.logs / "rewards-import.log", functions=inputs.functions)

    def score_rewards(prompts: list[Prompt], texts: list[str]) -> Sequence[Mapping[str, float]]:
        groups = [_as_group(prompt, text, loaded.tokenizer.encode(text, add_special_tokens=False), eos_id)
                  for prompt, text in zip(prompts, texts)]  # fmt: skip
        return [_components(group, outcomes[0]) for group, outcomes in zip(groups, score_all(rewards, groups))]

    found: list[TrajectoryGroup] = []
    try:
        for path in config.replay.imports:
            found += import_responses(
                Path(path),
                prompts=task.prompts("train"),
                tokenizer=loaded.tokenizer,
                eos_id=eos_id,
                score_rewards=score_rewards,
                score_reference=lambda prompts, responses: reference.score(
                    prompts, responses, config.generate.temperature
                ),
            )
    finally:
        rewards.close()
    return found


def _as_group(prompt: Prompt, text: str, token_ids: list[int], eos_id: int) -> FinishedGroup:
    """One finished response, as a reward sees it."""
    unknown = np.full(len(token_ids) + 1, np.nan, np.float32)
    completion = Completion(
        prompt_id=prompt.id,
        sample_index=0,
        token_ids=np.array([*token_ids, eos_id], np.int32),
        behaviour_log_probs=unknown,
        policy_log_probs=unknown,
        version_spans=((0, 0),),
        finish="stop",
    )
    return FinishedGroup(prompt=prompt, completions=[completion], texts=[text])


def _components(group: FinishedGroup, outcome: Mapping[str, float | None] | RewardFailed) -> Mapping[str, float]:
    if isinstance(outcome, RewardFailed):
        raise ValueError(f"replay.imports: the reward of a response to prompt {group.prompt.id!r} failed: {outcome}.")
    return {name: math.nan if value is None else value for name, value in outcome.items()}
