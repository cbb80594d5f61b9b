"""Existing responses as a start for replay: trajectory balance learns from data of any origin.

One JSON object per line:

    {"prompt": "2+2=", "completion": " 4"}
    {"id": "train-17", "completion_ids": [9, 4, 2], "rewards": {"exact_match": 1.0}}
    {"prompt": [{"role": "user", "content": "2+2="}], "completion": "4"}

A row is matched to a prompt of the task by `id`, or else by `prompt` as the data has it. Text is tokenised and closed
with EOS; `completion_ids` are taken as they are, and count as cut off when they do not end with EOS. Rewards are
computed unless given, reference log-probs always. Nobody knows how likely these responses were when they were made:
behaviour and policy log-probs are NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup

RewardScorer = Callable[[list[Prompt], list[str]], Sequence[Mapping[str, float]]]
"""Prompts and response texts, one for one -> reward components of each, NaN = not applicable."""
ReferenceScorer = Callable[[list[np.ndarray], list[np.ndarray]], Sequence[np.ndarray]]
"""Prompt ids and response ids, one for one -> log-probs of the response tokens at the training temperature."""
SHOWN_PROBLEMS = 5


class Tokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """Response(prompt=prompt, text=" 4", token_ids=np.array([9, 2]), finished=True, rewards={"exact_match": 1.0})"""

    prompt: Prompt
    text: str
    token_ids: np.ndarray
    finished: bool
    rewards: Mapping[str, float] | None


def import_responses(
    path: Path,
    *,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    eos_id: int,
    score_rewards: RewardScorer,
    score_reference: ReferenceScorer,
    reference_version: int = 0,
    version: int = 0,
) -> list[TrajectoryGroup]:
    """One group per prompt, in the order of the file. A ValueError lists bad lines; nothing is half imported."""
    responses = _read(path, PromptFinder(prompts), tokenizer, eos_id)
    rewards = _complete_rewards(responses, score_rewards)
    log_refs = score_reference([r.prompt.token_ids for r in responses], [r.token_ids for r in responses])
    by_prompt: dict[str, list[Trajectory]] = {}
    for response, components, log_ref in zip(responses, rewards, log_refs, strict=True):
        members = by_prompt.setdefault(response.prompt.id, [])
        completion = _completion(response, sample_index=len(members), version=version)
        members.append(_trajectory(completion, components, log_ref, reference_version))
    prompt_of = {response.prompt.id: response.prompt for response in responses}
    return [
        TrajectoryGroup(id=f"import:{path}:{prompt_id}", prompt=prompt_of[prompt_id], trajectories=tuple(members))
        for prompt_id, members in by_prompt.items()
    ]


class PromptFinder:
    """The task's prompts by id and by text; of prompts with the same text, the first."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._by_id = {prompt.id: prompt for prompt in prompts}
        self._by_text = {self._key(prompt.text): prompt for prompt in reversed(prompts)}

    def find(self, row: Mapping[str, Any]) -> Prompt:
        if "id" in row:
            prompt = self._by_id.get(str(row["id"]))
        elif "prompt" in row:
            prompt = self._by_text.get(self._key(row["prompt"]))
        else:
            raise ValueError("has neither `id` nor `prompt`")
        if prompt is None:
            named = f"id {row['id']!r}" if "id" in row else f"prompt {str(row['prompt'])[:60]!r}"
            raise ValueError(f"{named} is none of the task's {len(self._by_id)} prompts")
        return prompt

    @staticmethod
    def _key(text: Any) -> str:
        return json.dumps(text, sort_keys=True)


def _read(path: Path, finder: PromptFinder, tokenizer: Tokenizer, eos_id: int) -> list[Response]:
    if not path.is_file():
        raise ValueError(f"replay.imports: {path} does not exist.")
    responses: list[Response] = []
    problems: list[str] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    responses.append(_parse(line, finder, tokenizer, eos_id))
            except ValueError as error:
                problems.append(f"line {number} {error}")
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:SHOWN_PROBLEMS])
        raise ValueError(
            f"replay.imports: {path} has {len(problems)} bad lines, so nothing was imported. The first:\n{shown}"
        )
    if not responses:
        raise ValueError(f"replay.imports: {path} holds no responses.")
    return responses


def _parse(line: str, finder: PromptFinder, tokenizer: Tokenizer, eos_id: int) -> Response:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, not an object")
    if ("completion" in row) == ("completion_ids" in row):
        raise ValueError("needs either `completion` or `completion_ids`")
    prompt = finder.find(row)
    ids = _tokens(row, tokenizer, eos_id)
    text = row["completion"] if "completion" in row else tokenizer.decode(ids, skip_special_tokens=True)
    token_ids = np.array(ids, np.int32)
    return Response(
        prompt=prompt, text=text, token_ids=token_ids, finished=ids[-1] == eos_id, rewards=_given_rewards(row)
    )


def _tokens(row: Mapping[str, Any], tokenizer: Tokenizer, eos_id: int) -> list[int]:
    if "completion" in row:
        if not isinstance(row["completion"], str):
            raise ValueError(f"`completion` is a {type(row['completion']).__name__}, not text")
        ids = tokenizer.encode(row["completion"], add_special_tokens=False)
        return ids if ids and ids[-1] == eos_id else [*ids, eos_id]
    ids = row["completion_ids"]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < len(tokenizer) for i in ids):
        raise ValueError(f"`completion_ids` must be a non-empty list of integers from 0 to {len(tokenizer) - 1}")
    return ids


def _given_rewards(row: Mapping[str, Any]) -> Mapping[str, float] | None:
    """null = not applicable."""
    given = row.get("rewards")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError("`rewards` must be an object of numbers by name")
    rewards = {name: math.nan if value is None else value for name, value in given.items()}
    if not all(isinstance(value, (int, float)) for value in rewards.values()):
        raise ValueError("`rewards` must be an object of numbers by name")
    return {name: float(value) for name, value in rewards.items()}


def _complete_rewards(responses: list[Response], score_rewards: RewardScorer) -> list[Mapping[str, float]]:
    """Those given, and in one call those that are missing."""
    missing = [r for r in responses if r.rewards is None]
    scores = score_rewards([r.prompt for r in missing], [r.text for r in missing]) if missing else []
    if len(scores) != len(missing):
        raise ValueError(f"score_rewards returned {len(scores)} results for {len(missing)} responses.")
    computed = iter(scores)
    return [r.rewards if r.rewards is not None else next(computed) for r in responses]


def _completion(response: Response, *, sample_index: int, version: int) -> Completion:
    unknown = np.full(len(response.token_ids), np.nan, np.float32)
    return Completion(
        prompt_id=response.prompt.id,
        sample_index=sample_index,
        token_ids=response.token_ids,
        behaviour_log_probs=unknown,
        policy_log_probs=unknown,
        version_spans=((0, version),),
        finish="stop" if response.finished else "length",
    )


def _trajectory(
    completion: Completion, rewards: Mapping[str, float], log_ref: np.ndarray, reference_version: int
) -> Trajectory:
    return Trajectory(
        completion=completion,
        rewards=rewards,
        log_ref=np.asarray(log_ref, np.float32),
        reference_version=reference_version,
        loss_mask=np.ones(len(completion.token_ids), np.bool_),
    )
