"""A user's reward functions: called with TRL's or verl's signature, their values checked, their failures reported.

TRL:   f(prompts, completions, completion_ids, **columns) -> list[float | None]      (trainer_state, log_extra and
       log_metric are among the columns)
verl:  compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or {"score": ...}

Both may be `async def`: the samples of a prompt are then awaited at once. An exception among the values costs its sample.

For chat prompts a completion is [{"role": "assistant", "content": text}], as in TRL. Of an episode it is all its messages,
and `environments` are copies of the environments at the end. A function gets all samples of a prompt in one call, and its
values may compare them: when it fails, all of them are lost. With `f.per_sample = True` the samples are then tried one by
one, and only the failing ones are lost. Nothing here imports torch or pydantic: a killed worker is back in a moment.
"""

from __future__ import annotations

import atexit
import inspect
import math
import pickle
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from tba.tasks.outcomes import Outcome, RewardBroken, RewardFailed
from tba.tasks.rewards.load_function import VERL_ARGUMENTS, describe, line_in, load_reward_function, shortened

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from tba.config import RewardConfig
    from tba.types import Completion

PromptText = str | list[dict[str, str]]
Columns = Mapping[str, Any]
LARGEST = 3.4e38
"""Largest reward: beyond it the 32-bit numbers that rewards are stored as are infinite."""


class WrongNumber(ValueError):
    """A reward returned no list, one with more or fewer values than it was given completions, or a dict without a score."""


NamedRewards = Mapping[str, str | Callable[..., Any]]
"""Reward functions by name, as config and data give them: a function, or `file.py:name`."""


def named_rewards(configs: Sequence[RewardConfig]) -> NamedRewards:
    """The rewards of a task for a worker, which does without the config's classes. Refuses two of one name."""
    names = [reward.label for reward in configs]
    if len(set(names)) != len(names):
        raise ValueError(f"task.rewards have the same name: {', '.join(names)}. Give them task.rewards[].name.")
    return {reward.label: reward.function for reward in configs}


class EpisodeEnd(NamedTuple):
    """What rewards get of an episode: EpisodeEnd(messages=[...], rewards={"Guess": 1.0}, environment=None, failure="")"""

    messages: Sequence[Mapping[str, Any]]
    rewards: Mapping[str, float]
    environment: bytes | None
    """Its pickled copy."""
    failure: str


def episode_ends(completions: Sequence[Completion]) -> list[EpisodeEnd]:
    """What rewards get of the completions' episodes; none where they are single responses."""
    found = [completion.episode for completion in completions]
    return [EpisodeEnd(own.messages, own.rewards, own.environment, own.failure) for own in found if own is not None]


class RewardSet:
    """All reward functions of a task."""

    def __init__(self, rewards: NamedRewards) -> None:
        self._rewards = [RewardFunction(load_reward_function(own), name=name) for name, own in rewards.items()]
        self.per_sample = all(reward.per_sample for reward in self._rewards)
        """Whether every reward says that its values do not depend on the other samples of a call."""
        self.is_async = all(reward.is_async for reward in self._rewards)

    @property
    def out_of_memory(self) -> bool:
        """Whether a call has failed for want of memory: what the function holds on to would make the next ones fail."""
        return any(reward.out_of_memory for reward in self._rewards)

    def score(
        self,
        prompt: PromptText,
        columns: Columns,
        texts: Sequence[str],
        completion_ids: Sequence[list[int]],
        step: int = 0,
        episodes: Sequence[EpisodeEnd] = (),
    ) -> list[Outcome]:
        """Components of each sample of one prompt, or why it has none; `step` is that of the weights that generated.
        `episodes` are the ends of the samples' episodes; none where they are single responses."""
        # `step` is set before the calls: trainer_state and log_metric of TRL's signature read it.
        for reward in self._rewards:
            reward.step, reward.episodes = step, episodes
        # Each reward sees all samples also where another has failed: none of them knows of the others.
        by_reward = {reward.name: reward(prompt, columns, texts, completion_ids) for reward in self._rewards}
        outcomes: list[Outcome] = []
        for sample in range(len(texts)):
            episode = episodes[sample] if episodes else None
            values: dict[str, float | None] = {} if episode is None else dict(episode.rewards)
            failed = RewardFailed(episode.failure) if episode is not None and episode.failure else None
            for name, own in by_reward.items():
                value = own[sample]
                if isinstance(value, RewardFailed):
                    failed = value
                else:
                    values[name] = value
            outcomes.append(values if failed is None else failed)
        return outcomes


class RewardFunction:
    """One reward: its name, and how to call it for the samples of one prompt."""

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.function = function
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))
        # Parameters decide the signature: all three names of verl's are taken for verl's, else it is TRL's.
        self._parameters = inspect.signature(function).parameters
        self._is_verl = set(self._parameters) >= VERL_ARGUMENTS
        # verl's signature gets one response a call, so its values cannot compare samples.
        self.per_sample: bool = self._is_verl or getattr(function, "per_sample", False) is True
        # An object with `async def __call__` counts too, which iscoroutinefunction of the object denies.
        self.is_async: bool = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self.out_of_memory = False
        self.step = 0
        """Optimizer step of the weights that generated what is scored."""
        self.episodes: Sequence[EpisodeEnd] = ()
        """Ends of the episodes that are scored."""

    def __call__(
        self, prompt: PromptText, columns: Columns, texts: Sequence[str], completion_ids: Sequence[list[int]]
    ) -> list[float | RewardFailed | None]:
        """One value per sample. A call that fails costs all its samples, unless the reward is per_sample: then they are
        tried one by one. Values of samples that were compared with others would mean something else when it comes alone."""
        count = len(texts)
        try:
            if self._is_verl:
                values = self._call_verl(columns, texts)
            else:
                values = self._call_trl(prompt, columns, texts, completion_ids)
            if len(values) != count:
                raise WrongNumber(
                    f"returned {len(values)} values for {count} completions: it must return one for each, in their order"
                )
            return [self._checked(value) for value in values]
        # BaseException: a reward that calls sys.exit must not end the worker.
        except BaseException as error:  # a user's code: reported with file and line, counted
            self.out_of_memory |= isinstance(error, MemoryError)
            where = f"{self.name} {self._where(error)}"
            if isinstance(error, WrongNumber):
                return [RewardBroken(where)] * count
            if count > 1 and not self.per_sample:
                where += (
                    f" (all {count} samples of the call are lost; where they do not depend on one another, say so in the "
                    f"file, {self.name}.per_sample = True, and only the failing one is)"
                )
            if count == 1 or not self.per_sample or isinstance(error, MemoryError):
                return [RewardFailed(where)] * count
        found, episodes = [], self.episodes
        for sample, (text, ids) in enumerate(zip(texts, completion_ids)):
            self.episodes = episodes[sample : sample + 1]
            found += self(prompt, columns, [text], [ids])
        return found

    def _checked(self, value: Any) -> float | RewardFailed | None:
        """A value as a number; what is none costs its sample only."""
        if value is None:
            return None
        if isinstance(value, BaseException):
            self.out_of_memory |= isinstance(value, MemoryError)
            return RewardFailed(f"{self.name} {self._where(value)}")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return RewardFailed(f"{self.name} returned {shortened(repr(value), 80)}, which is no number")
        if not math.isfinite(number) or abs(number) > LARGEST:
            return RewardFailed(f"{self.name} returned {number}, which is no finite 32-bit number")
        return number

    def _where(self, error: BaseException) -> str:
        """`failed at rewards.py:12: KeyError: 'answer'`: the innermost line of the reward's own file."""
        file = inspect.getsourcefile(inspect.unwrap(self.function)) if inspect.isfunction(self.function) else None
        line = None if file is None else line_in(file, error)
        place = f"at {file}:{line}: " if line is not None else f"({file}): " if file else ""
        return f"failed {place}{describe(error)}"

    def _call_trl(
        self, prompt: PromptText, columns: Columns, texts: Sequence[str], ids: Sequence[list[int]]
    ) -> list[Any]:
        count = len(texts)

        def log(name: str, value: Any) -> None:
            # In TRL the trainer logs it; here it is in the log of the rewards, with the step.
            print(f"step {self.step}: {name} = {value}", flush=True)

        completions: list[Any] = list(texts)
        if self.episodes:
            completions = [list(episode.messages) for episode in self.episodes]
        elif not isinstance(prompt, str):
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        arguments = {
            "trainer_state": SimpleNamespace(global_step=self.step),
            "log_extra": log,
            "log_metric": log,
            **{name: [value] * count for name, value in columns.items()},
            "prompts": [prompt] * count,
            "completions": completions,
            "completion_ids": [list(own) for own in ids],
        }
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters.values())
        if self.episodes and (takes_all or "environments" in self._parameters):
            arguments["environments"] = [own.environment and pickle.loads(own.environment) for own in self.episodes]
        # Without **columns a function gets only what it names, where TRL's would fail.
        if not takes_all:
            # Later keys win: a column named `prompts` or `completions` does not hide the real ones.
            arguments = {name: value for name, value in arguments.items() if name in self._parameters}
        [result] = awaited([self.function(**arguments)])
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, (str, bytes, Mapping, Set)) or not hasattr(result, "__iter__"):
            raise WrongNumber(f"returned a {type(result).__name__}: it must return a list, one number per completion")
        # Of a generator, which may have no end, one more than there may be.
        return list(result) if hasattr(result, "__len__") else list(islice(result, count + 1))

    def _call_verl(self, columns: Columns, texts: Sequence[str]) -> list[Any]:
        # verl's data keeps it as reward_model.ground_truth; a plain column of that name comes first.
        truth = columns.get("ground_truth", columns.get("reward_model", {}).get("ground_truth"))
        known = {
            "data_source": columns.get("data_source"),
            "ground_truth": truth,
            "extra_info": columns.get("extra_info"),
        }
        known = {name: value for name, value in known.items() if name in self._parameters}
        scores = awaited([self.function(solution_str=text, **known) for text in texts])
        if without := [score for score in scores if isinstance(score, dict) and "score" not in score]:
            raise WrongNumber(
                f"returned a dict with {', '.join(map(str, without[0])) or 'nothing'}: it must have `score`"
            )
        return [score["score"] if isinstance(score, dict) else score for score in scores]


def awaited(results: list[Any]) -> list[Any]:
    """Results of calls of a function; those of an `async def` are awaited together, and may be exceptions."""
    if not any(map(inspect.iscoroutine, results)):
        return results
    import asyncio  # few rewards need it, and every worker would wait for it

    async def caught(call: Any) -> Any:
        try:
            return await call
        except BaseException as error:  # `gather` itself would lose the line at which a call was cancelled
            return error

    async def together() -> list[Any]:
        return await asyncio.gather(*map(caught, results))

    return _event_loop().run_until_complete(together())


@cache
def _event_loop() -> AbstractEventLoop:
    """The event loop of all async rewards of this process. One for each call, as asyncio.run makes it, would break what a
    reward keeps between calls: an HTTP client belongs to the loop of its first use."""
    import asyncio

    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop
