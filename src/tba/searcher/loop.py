"""The searcher: it generates with the weights it has, scores, and sends. Responses whose reward failed are dropped and
counted. A searcher is also made from a config here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tba.config import Config
from tba.engine.contract import Engine, Scorer
from tba.engine.make_engine import make_engine, make_scorer, with_adapters
from tba.engine.sampling import training_sampling
from tba.models.load import LoadedModel
from tba.objectives.registry import make_objective
from tba.runtime.channels import GroupSender
from tba.runtime.columns import pack_responses
from tba.runtime.prompt_queue import RolloutSource
from tba.searcher.rollouts import PromptStream, ReferenceSamples, explore
from tba.searcher.values import StepValues, lost_without_values
from tba.tasks.environments.episodes import with_environments
from tba.tasks.outcomes import Outcome, RewardFailed, components_of, why_no_reward
from tba.tasks.rewards.pool import finished_group, make_rewards, outcomes_of
from tba.tasks.task import FinishedGroup, Rewards, Task
from tba.types import Completion, GroupId, Prompt, Request, Sampling, Trajectory, TrajectoryGroup, Weights

GROUPS_AT_ONCE = 4
"""Groups that share a reference pass while generation goes on: on a CPU 1.7x faster than one at a time."""
RECENT = 0.1
MOST_FAILURES = 100
"""Samples in a row without a reward that stop a run: a judge that hiccups fails fewer, a broken reward soon gets there."""


class TooManyRewardFailures(RuntimeError):
    """The reward fails on every sample: the run stops instead of training on an outage."""


@dataclass
class SearchCounts:
    """Counts of a searcher so far. The trainer sees them, and checkpoints of runs in one process hold them."""

    generated: int = 0
    sent: int = 0
    responses: int = 0
    tokens: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    none_in_a_row: int = 0
    """Samples of which every reward was None: no failure, but nothing to train on either."""
    tool_calls: int = 0
    tool_errors: int = 0

    def add(self, completions: Sequence[Completion]) -> None:
        self.generated += 1
        self.responses += len(completions)
        for completion in completions:
            self.tokens += len(completion.token_ids)
            if completion.episode is not None:
                self.tool_calls += completion.episode.tool_calls
                self.tool_errors += completion.episode.tool_errors

    def see(self, outcome: Outcome, prompt: Prompt) -> None:
        """Count the outcome of a sample; too many without a reward in a row stop the run."""
        why = why_no_reward(outcome)
        if not why:
            self.failures_in_a_row = self.none_in_a_row = 0
        elif not isinstance(outcome, RewardFailed) and all(value is None for value in outcome.values()):
            self.none_in_a_row += 1
        else:
            self.failures += 1
            self.failures_in_a_row += 1
        if self.none_in_a_row >= MOST_FAILURES:
            raise TooManyRewardFailures(
                f"{why} for {self.none_in_a_row} samples in a row, the last of prompt {prompt.id!r}: there is nothing "
                "to train on. Have one of task.rewards return a number."
            )
        if self.failures_in_a_row >= MOST_FAILURES:
            raise TooManyRewardFailures(
                f"the reward failed on {self.failures_in_a_row} samples in a row; the last: {why} (prompt "
                f"{prompt.id!r}). Correct that first."
            )

    def state(self) -> dict[str, Any]:
        """Also decides the ids of the next groups."""
        return vars(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)


@dataclass
class Searcher:
    """consumes: leased rollouts, newer weights when there are any
    waits for: room in the group channel, its own rewards, and the trainer when it is ahead of the pace limit
    produces: scored trajectory groups
    unblocked by: the trainer
    """

    engine: Engine
    prompts: PromptStream
    rewards: Rewards
    reference: Scorer
    """The frozen reference. One group is always scored by one."""
    sender: GroupSender
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    samples_per_prompt: int
    """Number of responses of a rollout, those of the reference included."""
    index: int = 0
    incarnation: str = "0"
    """Short id of this start of the searcher, part of the ids of its groups; 0 where the roles take turns."""
    explore: Callable[[Request], Request] = lambda request: request
    reference_samples: ReferenceSamples | None = None
    step_values: StepValues | None = None
    counts: SearchCounts = field(default_factory=SearchCounts)
    reference_version: int = 0
    rollout_lag: float = 0.0
    """Mean over recent rollouts: versions that came from the first token until the group was sent."""
    _rewarded: list[tuple[FinishedGroup, list[Outcome]]] = field(default_factory=list)

    def step(self, num_prompts: int) -> None:
        """Draw the next prompts, then send their groups in the order of the prompts (synchronous mode)."""
        requests = self.prompts.take(num_prompts)
        finished: dict[tuple[str, int], FinishedGroup] = {}
        for group in self._finished_groups(iter(requests), None):
            self.rewards.submit(group)  # at once: a slow reward is called while other responses are written
            finished[group.prompt.id, group.completions[0].sample_index] = group
        in_order = [finished[request.prompt.id, request.first_sample] for request in requests]
        self._send(list(zip(in_order, outcomes_of(self.rewards, in_order))))

    def run(self, requests: Iterator[Request | None], between_steps: Callable[[], None]) -> None:
        """Draw prompts until `requests` ends, sending each group as soon as it is scored."""
        # The engine drives this loop: it draws from `requests` and calls `between_steps` between decode steps.
        for group in self._finished_groups(requests, between_steps):
            self.rewards.submit(group)
            self.send_ready(at_least=GROUPS_AT_ONCE)
        self.send_ready()

    def send_ready(self, *, at_least: int = 1) -> None:
        """Send the groups whose rewards are there, if they are enough; never waits for rewards."""
        self._rewarded += self.rewards.ready()
        if len(self._rewarded) >= at_least:
            rewarded, self._rewarded = self._rewarded, []
            self._send(rewarded)

    def load_reference(self, weights: Weights) -> None:
        """From now on responses are scored, and some generated, by these weights."""
        self.reference.load(weights)
        self.reference_version = weights.version
        if self.reference_samples is not None:
            self.reference_samples.engine.load(weights)

    def close(self) -> None:
        self.engine.close()
        self.rewards.close()
        if self.step_values is not None:
            self.step_values.rewards.close()

    def _finished_groups(
        self, requests: Iterator[Request | None], between_steps: Callable[[], None] | None
    ) -> Iterator[FinishedGroup]:
        """Groups, samples in order, as soon as all samples of a rollout are there."""
        # The key has the first sample too: two rollouts of one prompt may run side by side.
        requested: dict[tuple[str, int], Request] = {}
        members: dict[tuple[str, int], list[Completion]] = {}

        def remembered() -> Iterator[Request | None]:
            for request in requests:
                if request is not None:
                    requested[request.prompt.id, request.first_sample] = request
                    request = self.explore(request)
                yield request

        own = self.samples_per_prompt - (0 if self.reference_samples is None else self.reference_samples.count)
        for completion in self.engine.generate(
            remembered(), samples_per_prompt=own, sampling=self.sampling, between_steps=between_steps
        ):
            # The first sample of a rollout is a multiple of samples_per_prompt (PromptStream), so any sample gives it.
            first_sample = completion.sample_index // self.samples_per_prompt * self.samples_per_prompt
            rollout = completion.prompt_id, first_sample
            members.setdefault(rollout, []).append(completion)
            # Samples of a rollout end in any order; rewards may compare them, so that a rollout is scored as a whole.
            if len(members[rollout]) < own:
                continue
            request, completions = requested.pop(rollout), members.pop(rollout)
            if self.reference_samples is not None:
                # The policy has samples first to first + own - 1, and the reference those that follow.
                completions += self.reference_samples(request.prompt, first_sample=first_sample + own)
            completions.sort(key=lambda completion: completion.sample_index)
            self.counts.add(completions)
            yield finished_group(self.tokenizer, request.prompt, completions, rollout=request.rollout)

    def _send(self, scored: Sequence[tuple[FinishedGroup, list[Outcome]]]) -> None:
        if self.step_values is not None:
            values = self.step_values(self.engine, [group for group, _ in scored])
            scored = [
                (replace(group, step_values=own), lost_without_values(outcomes, own))
                for (group, outcomes), own in zip(scored, values)
            ]
        for (group, outcomes), trajectories in zip(scored, self._trajectories(scored)):
            # Versions that came meanwhile: the pace limit of later rollouts allows for as many.
            versions = self.engine.version - group.completions[0].version
            self.rollout_lag += RECENT * (versions - self.rollout_lag)
            # The number rises by one with each group sent: the receivers' high-water marks take a lower one for a copy.
            number = self.counts.sent
            group_id = str(GroupId(sender=f"searcher-{self.index}", incarnation=self.incarnation, number=number))
            self.sender.send(
                TrajectoryGroup(
                    id=group_id,
                    prompt=group.prompt,
                    trajectories=pack_responses(trajectories, group_id),
                    rollout=group.rollout,
                    num_lost=len(group.completions) - len(trajectories),
                    why_lost=next(filter(None, map(why_no_reward, outcomes)), ""),
                    searcher=self.index,
                )
            )
            self.counts.sent += 1

    def _trajectories(self, groups: Sequence[tuple[FinishedGroup, list[Outcome]]]) -> list[list[Trajectory]]:
        """Trajectories of each group, without the samples that have no reward."""
        scored: list[list[Trajectory]] = [[] for _ in groups]
        samples: list[tuple[int, Prompt, Completion, Mapping[str, float | None], np.ndarray | None]] = []
        for index, (group, outcomes) in enumerate(groups):
            for completion, outcome, values in zip(group.completions, outcomes, group.values_of_samples()):
                # Counted before anything is dropped: a reward that always fails must stop the run.
                self.counts.see(outcome, group.prompt)
                if (components := components_of(outcome)) is not None:
                    samples.append((index, group.prompt, completion, components, values))
        # Equal responses to a prompt are computed once.
        keys = [(prompt.id, completion.token_ids.tobytes()) for _, prompt, completion, _, _ in samples]
        distinct = {key: (prompt, completion) for key, (_, prompt, completion, _, _) in zip(keys, samples)}
        log_refs = dict[tuple[str, bytes], np.ndarray]()
        if distinct:
            prompts = [prompt.token_ids for prompt, _ in distinct.values()]
            responses = [completion.token_ids for _, completion in distinct.values()]
            log_refs = dict(zip(distinct, self.reference.score(prompts, responses, self.sampling.temperature)))
        for key, (index, _, completion, components, values) in zip(keys, samples):
            # None is a component that does not apply; it is NaN in the arrays of the replay.
            rewards = {name: math.nan if value is None else float(value) for name, value in components.items()}
            scored[index].append(
                Trajectory(
                    completion=completion,
                    rewards=rewards,
                    log_ref=log_refs[key],
                    reference_version=self.reference_version,
                    loss_mask=completion.loss_mask,
                    step_values=values,
                )
            )
        return scored


def group_texts(tokenizer: PreTrainedTokenizerBase, group: TrajectoryGroup) -> list[str]:
    # The special tokens of an episode stay: they show where a turn ends, and who speaks next.
    return [
        str(tokenizer.decode(each.completion.token_ids.tolist(), skip_special_tokens=bool(each.loss_mask.all())))
        for each in group.trajectories
    ]


# From a config


def make_search_engine(config: Config, loaded: LoadedModel) -> Engine:
    """The engine with the model's weights as version 0. Where the roles take turns, a response is of one version."""
    engine = make_engine(
        loaded.model,
        loaded.tokenizer,
        config.generate,
        seed=config.seed,
        max_length=loaded.context,
        update="drain" if config.is_synchronous else "in_flight",
        explores=config.search.explore.probability > 0.0,
    )
    engine = engine if config.model.lora is None else with_adapters(engine, loaded.model)
    if config.task.environment.agent is not None:
        from tba.serve.agents import with_agents  # needs an extra

        return with_agents(engine, config, loaded.tokenizer)
    return with_environments(engine, config, loaded.tokenizer)


def make_reference_engine(config: Config, loaded: LoadedModel) -> Engine | None:
    """An engine with the model's weights as they are now; None unless search.explore.reference_share asks for it."""
    count = config.reference_samples_per_prompt
    if count == 0:
        return None
    # More slots would stay empty: ReferenceSamples generates one rollout at a time.
    slots = min(count, config.generate.slots or count)
    generate = config.generate.model_copy(update={"slots": slots})
    return make_engine(
        loaded.model, loaded.tokenizer, generate, seed=config.seed, max_length=loaded.context, update="drain"
    )


def make_searcher(
    config: Config,
    loaded: LoadedModel,
    task: Task,
    *,
    engine: Engine,
    reference_engine: Engine | None,
    counts: SearchCounts,
    rollouts: RolloutSource,
    sender: GroupSender,
    log: Path,
    between_steps: Callable[[], None] | None = None,
    index: int = 0,
    incarnation: str = "0",
) -> Searcher:
    """Searcher `index`, with the workers of its rewards. The loaded weights become its frozen reference.
    `between_steps` is called while others than the policy's own responses are generated."""
    sampling, samples, explores = training_sampling(config), config.samples_generated_per_prompt, config.search.explore
    # Reference and continuations have the run's plain sampling: explored rollouts alone have another.
    reference_samples = step_values = None
    if reference_engine is not None:
        count = config.reference_samples_per_prompt
        reference_samples = ReferenceSamples(reference_engine, count, sampling, between_steps)
    if continuations := make_objective(config).continuations:
        step_values = StepValues(
            rewards=make_rewards(task, config, log=log.with_name(f"{log.stem}-values.log")),
            reward_weights=task.reward_weights,
            tokenizer=loaded.tokenizer,
            sampling=sampling,
            continuations=continuations,
            cut_off_reward=config.train.cut_off_reward,
            between_steps=between_steps,
        )
    return Searcher(
        engine=engine,
        prompts=PromptStream(task.prompts("train"), rollouts, samples_per_prompt=samples),
        rewards=make_rewards(task, config, log=log),
        reference=reference_engine or make_scorer(loaded.model, max_length=loaded.context),
        counts=counts,
        sender=sender,
        tokenizer=loaded.tokenizer,
        explore=lambda request: explore(request, sampling, explores, seed=config.seed),
        sampling=sampling,
        samples_per_prompt=samples,
        step_values=step_values,
        reference_samples=reference_samples,
        index=index,
        incarnation=incarnation,
    )


def make_start_scorer(config: Config, loaded: LoadedModel, searcher: Searcher) -> Scorer:
    """Scorer with the start model, for evaluations: the searcher's reference, unless that is reset."""
    if config.reference.reset_every:
        return make_scorer(loaded.model, max_length=loaded.context)
    return searcher.reference
