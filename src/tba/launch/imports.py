"""Existing responses that a run starts from (replay.imports): trajectory balance learns from data of any origin.

One JSON object per line:

    {"prompt": "2+2=", "completion": " 4"}
    {"id": "train-17", "completion_ids": [9, 4, 2], "rewards": {"exact_match": 1.0}, "finish": "stop"}
    {"prompt": [{"role": "user", "content": "2+2="}], "completion": "4"}

A line is matched to a prompt of the task by `id`, or else by `prompt` as the data has it. Text is tokenised and closed with
EOS; `completion_ids` are taken as they are, whatever text stands beside them, and when they do not end with a stop token
they count as cut off, for the task's reward too, unless `finish` says that they ended (`stop`) or were cut off (`length`).
`tba replay RUN --export` writes such files. Rewards are computed unless given, reference log-probs always. Nobody knows how
likely these responses were when they were made: behaviour and policy log-probs are NaN.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tba.config import Config
from tba.generate.make import make_scorer, stop_ids_of
from tba.launch.run import RunInputs
from tba.tasks.base import FinishedGroup
from tba.tasks.outcomes import RewardFailed
from tba.tasks.rewards.pool import make_rewards, score_all
from tba.types import Completion, GroupId, Prompt, Trajectory, TrajectoryGroup

RewardScorer = Callable[[list[FinishedGroup]], Sequence[Mapping[str, float]]]
"""Groups of one response each -> reward components of each response, NaN = not applicable."""
ReferenceScorer = Callable[[list[np.ndarray], list[np.ndarray]], Sequence[np.ndarray]]
"""Prompt ids and response ids, one for one -> log-probs of the response tokens at the training temperature."""
SHOWN_PROBLEMS = 5
"""Number of bad lines that an error names; of the others it gives the count."""
LARGEST_REWARD = 1e30
"""Rewards are stored as float32."""
START_VERSION = 0
"""Version of the weights, and of the reference, that imported responses are stored with: those that the run starts from."""


def import_groups(config: Config, inputs: RunInputs) -> list[TrajectoryGroup]:
    """The responses of every file of replay.imports, with rewards and reference log-probs of the model as it is now: the
    caller imports before the first optimizer step, while the model is still the reference, and before there is a run folder,
    so that a bad file costs nothing."""
    if not config.replay.imports:
        return []
    with tempfile.TemporaryDirectory() as logs:
        return _import_groups(config, inputs, log=Path(logs) / "rewards.log")


def _import_groups(config: Config, inputs: RunInputs, *, log: Path) -> list[TrajectoryGroup]:
    loaded, task = inputs.loaded, inputs.task
    stop_ids = stop_ids_of(loaded.model, loaded.tokenizer)
    eos_id = loaded.tokenizer.eos_token_id
    reference = make_scorer(loaded.model, max_length=loaded.context)
    rewards = make_rewards(task, config, log=log)

    def score_rewards(groups: list[FinishedGroup]) -> list[Mapping[str, float]]:
        return [_components(group, outcomes[0]) for group, outcomes in zip(groups, score_all(rewards, groups))]

    found: list[TrajectoryGroup] = []
    try:
        for path in config.replay.imports:
            found += import_responses(
                Path(path),
                prompts=task.prompts("train"),
                tokenizer=loaded.tokenizer,
                eos_id=stop_ids[0] if eos_id is None else eos_id,
                stop_ids=stop_ids,
                context=loaded.context,
                reward_names=tuple(task.reward_weights),
                score_rewards=score_rewards,
                score_reference=lambda prompts, responses: reference.score(
                    prompts, responses, config.generate.temperature
                ),
            )
    finally:
        rewards.close()
    return found


def _components(group: FinishedGroup, outcome: Mapping[str, float | None] | RewardFailed) -> Mapping[str, float]:
    if isinstance(outcome, RewardFailed):
        raise ValueError(f"replay.imports: the reward of a response to prompt {group.prompt.id!r} failed: {outcome}.")
    return {name: math.nan if value is None else value for name, value in outcome.items()}


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ImportedResponse:
    """ImportedResponse(prompt=prompt, text=" 4", token_ids=np.array([9, 2]), finished=True, rewards={"exact_match": 1.0})"""

    prompt: Prompt
    text: str
    token_ids: np.ndarray
    """Token ids of the response, int32 [T]."""
    finished: bool
    """Whether the response ends with a stop token; otherwise it counts as cut off."""
    rewards: Mapping[str, float] | None
    """Reward components that the file gives, None = they are to be computed."""

    def completion(self, *, sample_index: int = 0) -> Completion:
        # NaN is also what tells the buffer that no policy generated the response, so that it has no lag.
        unknown = np.full(len(self.token_ids), np.nan, np.float32)
        return Completion(
            prompt_id=self.prompt.id,
            sample_index=sample_index,
            token_ids=self.token_ids,
            behaviour_log_probs=unknown,
            policy_log_probs=unknown,
            version_spans=((0, START_VERSION),),
            finish="stop" if self.finished else "length",
        )


def import_responses(
    path: Path,
    *,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    eos_id: int,
    stop_ids: Collection[int],
    context: int,
    reward_names: Collection[str],
    score_rewards: RewardScorer,
    score_reference: ReferenceScorer,
) -> list[TrajectoryGroup]:
    """The responses of one file, one group per prompt, in the order of the file. Bad lines are an error that lists them;
    nothing is half imported. `eos_id` closes texts; a response that ends with one of `stop_ids` is finished. Prompt and
    response have at most `context` tokens."""
    reader = LineReader(PromptFinder(prompts), tokenizer, eos_id, frozenset(stop_ids), context, tuple(reward_names))
    responses = _read(path, reader)
    rewards = _complete_rewards(responses, score_rewards)
    log_refs = score_reference([r.prompt.token_ids for r in responses], [r.token_ids for r in responses])
    by_prompt: dict[str, list[Trajectory]] = {}
    for response, components, log_ref in zip(responses, rewards, log_refs, strict=True):
        members = by_prompt.setdefault(response.prompt.id, [])
        members.append(_trajectory(response, components, log_ref, sample_index=len(members)))
    prompt_of = {response.prompt.id: response.prompt for response in responses}
    # Made from the path: a file that is imported again, in the same run, brings groups that are known.
    incarnation = blake2b(str(path).encode(), digest_size=4).hexdigest()
    return [
        TrajectoryGroup(
            id=str(GroupId(sender="import", incarnation=incarnation, number=number)),
            prompt=prompt_of[prompt_id],
            trajectories=tuple(members),
        )
        for number, (prompt_id, members) in enumerate(by_prompt.items())
    ]


class PromptFinder:
    """The task's prompts by id and by text; of prompts with the same text, the first."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._by_id = {prompt.id: prompt for prompt in prompts}
        self._by_text = {self._key(prompt.text): prompt for prompt in reversed(prompts)}

    def find(self, line: Mapping[str, Any]) -> Prompt:
        """The prompt that a line of the file names."""
        if "id" in line:
            prompt = self._by_id.get(str(line["id"]))
        elif "prompt" in line:
            prompt = self._by_text.get(self._key(line["prompt"]))
        else:
            raise ValueError("has neither `id` nor `prompt`")
        if prompt is None:
            named = f"id {line['id']!r}" if "id" in line else f"prompt {str(line['prompt'])[:60]!r}"
            raise ValueError(f"{named} is none of the task's {len(self._by_id)} prompts")
        return prompt

    @staticmethod
    def _key(text: Any) -> str:
        """Text, or a list of chat messages, as a string: a list is no key of a dict."""
        return json.dumps(text, sort_keys=True)


def _read(path: Path, reader: LineReader) -> list[ImportedResponse]:
    if not path.is_file():
        raise ValueError(f"replay.imports: {path} does not exist.")
    responses: list[ImportedResponse] = []
    problems: list[str] = []
    with path.open("rb") as lines:  # of bytes: one that is not UTF-8 is an error of its line
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    responses.append(reader.parse(line.decode()))
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


@dataclass(frozen=True)
class LineReader:
    """LineReader(PromptFinder(prompts), tokenizer, 2, {2, 5}, context=512, reward_names=["f"]).parse('{"id": "p0", ...}')"""

    finder: PromptFinder
    tokenizer: Tokenizer
    eos_id: int
    stop_ids: frozenset[int]
    context: int
    reward_names: tuple[str, ...]
    """Names of the task's rewards."""

    def parse(self, text: str) -> ImportedResponse:
        try:
            line = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None
        if not isinstance(line, dict):
            raise ValueError(f"is a {type(line).__name__}, not an object")
        if "completion" not in line and "completion_ids" not in line:
            raise ValueError("needs `completion` or `completion_ids`")
        prompt = self.finder.find(line)
        ids = self._tokens(line)
        if len(prompt.token_ids) + len(ids) > self.context:
            raise ValueError(
                f"has {len(ids)} tokens, which with the {len(prompt.token_ids)} of its prompt exceed the model's context of "
                f"{self.context}"
            )
        return ImportedResponse(
            prompt=prompt,
            text=self.tokenizer.decode(ids, skip_special_tokens=True)
            if "completion_ids" in line
            else line["completion"],
            token_ids=np.array(ids, np.int32),
            finished=_finish(line, "stop" if ids[-1] in self.stop_ids else "length") == "stop",
            rewards=_given_rewards(line, self.reward_names),
        )

    def _tokens(self, line: Mapping[str, Any]) -> list[int]:
        if "completion_ids" not in line:
            if not isinstance(line["completion"], str):
                raise ValueError(f"`completion` is a {type(line['completion']).__name__}, not text")
            line["completion"].encode()  # half a surrogate pair is no text
            ids = self.tokenizer.encode(line["completion"], add_special_tokens=False)
            return ids if ids and ids[-1] in self.stop_ids else [*ids, self.eos_id]
        ids, largest = line["completion_ids"], len(self.tokenizer) - 1
        # `type(i) is int`, because True and False are integers to isinstance.
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i <= largest for i in ids):
            raise ValueError(f"`completion_ids` must be a non-empty list of integers from 0 to {largest}")
        return ids


def _finish(line: Mapping[str, Any], otherwise: str) -> str:
    finish = line.get("finish", otherwise)
    if finish not in ("stop", "length"):
        raise ValueError(f'`finish` is {finish!r}: write "stop" or "length", or leave it out')
    return finish


def _given_rewards(line: Mapping[str, Any], names: Collection[str]) -> Mapping[str, float] | None:
    """The rewards that a line gives, null = not applicable; None where it gives none."""
    given = line.get("rewards")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"`rewards` is a {type(given).__name__}, not an object of numbers by name")
    if unknown := sorted(given.keys() - set(names)):
        raise ValueError(f"has rewards {unknown}, and the task's are {sorted(names)}: rename or leave out `rewards`")
    numbers = [value for value in given.values() if value is not None]
    if not all(isinstance(value, (int, float)) and abs(value) <= LARGEST_REWARD for value in numbers):
        raise ValueError(f"`rewards` must be an object of numbers by name, of at most {LARGEST_REWARD:g}, or null")
    return {name: math.nan if value is None else float(value) for name, value in given.items()}


def _complete_rewards(responses: list[ImportedResponse], score_rewards: RewardScorer) -> list[Mapping[str, float]]:
    """The rewards of each response: those given, and those that are missing, computed in one call."""
    missing = [r for r in responses if r.rewards is None]
    # Each response as it stands in the file: what was cut off, or tokenised in another way, is graded as that.
    groups = [FinishedGroup(prompt=r.prompt, completions=[r.completion()], texts=[r.text]) for r in missing]
    scores = score_rewards(groups) if groups else []
    if len(scores) != len(missing):
        raise ValueError(f"score_rewards returned {len(scores)} results for {len(missing)} responses.")
    computed = iter(scores)
    return [r.rewards if r.rewards is not None else next(computed) for r in responses]


def _trajectory(
    response: ImportedResponse, rewards: Mapping[str, float], log_ref: np.ndarray, *, sample_index: int
) -> Trajectory:
    completion = response.completion(sample_index=sample_index)
    return Trajectory(
        completion=completion,
        rewards=rewards,
        log_ref=np.asarray(log_ref, np.float32),
        reference_version=START_VERSION,
        loss_mask=np.ones(len(completion.token_ids), np.bool_),
    )
