"""Existing responses that a run starts from (replay.imports): trajectory balance learns from data of any origin.

One JSON object per line:

    {"prompt": "2+2=", "completion": " 4"}
    {"id": "train-17", "completion_ids": [9, 4, 2], "rewards": {"exact_match": 1.0}, "finish": "stop"}
    {"prompt": [{"role": "user", "content": "2+2="}], "completion": "4"}

A line is matched to a prompt of the task by `id`, or else by `prompt` as the data has it. Text is tokenised and closed with
EOS. `completion_ids` are taken as they are, and text beside them is not read. `finish` says whether they ended (`stop`) or
were cut off (`length`). Without it, ids that do not end with a stop token count as cut off, for the task's reward too.
`tba replay RUN --export` writes such files. Rewards are computed unless given, reference log-probs always. The policy that
made these responses is unknown, so behaviour and policy log-probs are NaN.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba.config import Config
from tba.engine.make_engine import make_scorer, stop_ids_of
from tba.run.modes import RunInputs
from tba.tasks.outcomes import RewardFailed
from tba.tasks.rewards.pool import make_rewards, score_all
from tba.tasks.task import FinishedGroup
from tba.types import Completion, GroupId, Prompt, Trajectory, TrajectoryGroup

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
    loaded, task = inputs.loaded, inputs.task
    stop_ids, eos_id = stop_ids_of(loaded.model, loaded.tokenizer), loaded.tokenizer.eos_token_id
    reference = make_scorer(loaded.model, max_length=loaded.context)
    with tempfile.TemporaryDirectory() as logs:
        rewards = make_rewards(task, config, log=Path(logs) / "rewards.log")

        def score_rewards(groups: list[FinishedGroup]) -> list[dict[str, float]]:
            scored = []
            for group, (outcome,) in zip(groups, score_all(rewards, groups)):
                if isinstance(outcome, RewardFailed):
                    raise ValueError(
                        f"replay.imports: the reward of a response to prompt {group.prompt.id!r} failed: {outcome}."
                    )
                scored.append({name: math.nan if value is None else value for name, value in outcome.items()})
            return scored

        importer = Importer(
            prompts=task.prompts("train"),
            tokenizer=loaded.tokenizer,
            eos_id=stop_ids[0] if eos_id is None else eos_id,
            stop_ids=frozenset(stop_ids),
            context=loaded.context,
            reward_names=frozenset(task.reward_weights),
            score_rewards=score_rewards,
            score_reference=lambda prompts, responses: reference.score(prompts, responses, config.generate.temperature),
        )
        try:
            return [group for path in config.replay.imports for group in importer.groups(Path(path))]
        finally:
            rewards.close()


class Response(NamedTuple):
    """A line of the file: Response(prompt, " 4", completion, {"exact_match": 1.0})"""

    prompt: Prompt
    text: str
    completion: Completion
    rewards: Mapping[str, float] | None
    """Reward components that the file gives, None = they are to be computed."""


@dataclass(kw_only=True, eq=False)
class Importer:
    """Makes groups of the lines of a file: Importer(prompts=task.prompts("train"), ...).groups(path)"""

    prompts: Sequence[Prompt]
    tokenizer: Any
    eos_id: int
    """Closes texts."""
    stop_ids: AbstractSet[int]
    """A response that ends with one of them is finished."""
    context: int
    """Most tokens of prompt and response."""
    reward_names: AbstractSet[str]
    score_rewards: Callable[[list[FinishedGroup]], Sequence[Mapping[str, float]]]
    """Groups of one response each -> reward components of each response, NaN = not applicable."""
    score_reference: Callable[[list[np.ndarray], list[np.ndarray]], Sequence[np.ndarray]]
    """Prompt ids and response ids, one for one -> log-probs of the response tokens at the training temperature."""

    def groups(self, path: Path) -> list[TrajectoryGroup]:
        """One group per prompt, in the order of the file. Bad lines are an error, and then nothing is imported."""
        responses = self._read(path)
        # Each response as it stands in the file: what was cut off, or tokenised in another way, is graded as that.
        missing = [
            FinishedGroup(prompt=found.prompt, completions=[found.completion], texts=[found.text])
            for found in responses
            if found.rewards is None
        ]
        computed = iter(self.score_rewards(missing) if missing else [])
        log_refs = self.score_reference(
            [r.prompt.token_ids for r in responses], [r.completion.token_ids for r in responses]
        )
        by_prompt: dict[str, tuple[Prompt, list[Trajectory]]] = {}
        for response, log_ref in zip(responses, log_refs, strict=True):
            _, members = by_prompt.setdefault(response.prompt.id, (response.prompt, []))
            members.append(
                Trajectory(
                    completion=replace(response.completion, sample_index=len(members)),
                    rewards=next(computed) if response.rewards is None else response.rewards,
                    log_ref=np.asarray(log_ref, np.float32),
                    reference_version=START_VERSION,
                    loss_mask=np.ones(len(response.completion.token_ids), np.bool_),
                )
            )
        # Made from the path: a file that is imported again, in the same run, brings groups that are known.
        incarnation = blake2b(str(path).encode(), digest_size=4).hexdigest()
        ids = (str(GroupId(sender="import", incarnation=incarnation, number=n)) for n in range(len(by_prompt)))
        return [
            TrajectoryGroup(id=id, prompt=prompt, trajectories=tuple(members))
            for id, (prompt, members) in zip(ids, by_prompt.values())
        ]

    def _read(self, path: Path) -> list[Response]:
        if not path.is_file():
            raise ValueError(f"replay.imports: {path} does not exist.")
        responses: list[Response] = []
        problems: list[str] = []
        with path.open("rb") as lines:  # of bytes: one that is not UTF-8 is an error of its line
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip():
                        responses.append(self._parse(line.decode()))
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

    def _parse(self, text: str) -> Response:
        try:
            line = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None
        if not isinstance(line, dict):
            raise ValueError(f"is a {type(line).__name__}, not an object")
        if "completion" not in line and "completion_ids" not in line:
            raise ValueError("needs `completion` or `completion_ids`")
        prompt, ids = self._prompt(line), self._tokens(line)
        if len(prompt.token_ids) + len(ids) > self.context:
            raise ValueError(
                f"has {len(ids)} tokens, which with the {len(prompt.token_ids)} of its prompt exceed the model's context of "
                f"{self.context}"
            )
        finish = line.get("finish", "stop" if ids[-1] in self.stop_ids else "length")
        if finish not in ("stop", "length"):
            raise ValueError(f'`finish` is {finish!r}: write "stop" or "length", or leave it out')
        # The buffer takes NaN as the mark of a response that no policy generated, and gives it no lag.
        unknown = np.full(len(ids), np.nan, np.float32)
        completion = Completion(
            prompt_id=prompt.id,
            sample_index=0,
            token_ids=np.array(ids, np.int32),
            behaviour_log_probs=unknown,
            policy_log_probs=unknown,
            version_spans=((0, START_VERSION),),
            finish=finish,
        )
        has_ids = "completion_ids" in line
        shown = self.tokenizer.decode(ids, skip_special_tokens=True) if has_ids else line["completion"]
        return Response(prompt, shown, completion, self._rewards(line))

    def __post_init__(self) -> None:
        self._by_id = {prompt.id: prompt for prompt in self.prompts}
        # Of prompts with the same text, the first. A list of chat messages is no key of a dict, but its JSON is.
        self._by_text = {json.dumps(prompt.text, sort_keys=True): prompt for prompt in reversed(self.prompts)}

    def _prompt(self, line: Mapping[str, Any]) -> Prompt:
        if "id" in line:
            prompt, named = self._by_id.get(str(line["id"])), f"id {line['id']!r}"
        elif "prompt" in line:
            prompt = self._by_text.get(json.dumps(line["prompt"], sort_keys=True))
            named = f"prompt {str(line['prompt'])[:60]!r}"
        else:
            raise ValueError("has neither `id` nor `prompt`")
        if prompt is None:
            raise ValueError(f"{named} is none of the task's {len(self._by_id)} prompts")
        return prompt

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

    def _rewards(self, line: Mapping[str, Any]) -> Mapping[str, float] | None:
        """The rewards that a line gives, null = not applicable; None where it gives none."""
        given = line.get("rewards")
        if given is None:
            return None
        if not isinstance(given, dict):
            raise ValueError(f"`rewards` is a {type(given).__name__}, not an object of numbers by name")
        if unknown := sorted(given.keys() - self.reward_names):
            names = sorted(self.reward_names)
            raise ValueError(f"has rewards {unknown}, and the task's are {names}: rename or leave out `rewards`")
        numbers = [value for value in given.values() if value is not None]
        if not all(isinstance(value, (int, float)) and abs(value) <= LARGEST_REWARD for value in numbers):
            raise ValueError(f"`rewards` must be an object of numbers by name, of at most {LARGEST_REWARD:g}, or null")
        return {name: math.nan if value is None else float(value) for name, value in given.items()}
