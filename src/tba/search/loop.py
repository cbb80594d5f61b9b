"""The searcher: explore with the weights at hand, score, send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from tba.generate.engine import Engine
from tba.runtime.channels import GroupSender
from tba.search.exploration import ReferenceSamples
from tba.search.prompts import Difficulty, PromptStream
from tba.search.scoring import GroupScorer
from tba.search.values import StepValues, lost_without_values
from tba.tasks.base import Outcome, RewardFailed
from tba.tasks.rewards.pool import FinishedGroup, Rewards, score_all, texts_of
from tba.types import Completion, GroupId, Prompt, Request, Sampling, Trajectory, TrajectoryGroup, Weights

GROUPS_AT_ONCE = 4
"""Groups that share a reference pass while generation goes on: on a CPU 1.7x faster than one at a time, and they wait for
one another only a few decode steps."""


@dataclass
class SearchCounts:
    """What a searcher has done so far."""

    generated: int = 0
    """Groups whose responses are complete."""
    sent: int = 0
    """Groups that were scored and sent."""
    responses: int = 0
    tokens: int = 0


@dataclass
class Searcher:
    """consumes: prompts of its shard, newer weights when there are any
    waits for: room in the group channel, and the trainer when it is ahead of the pace limit
    produces: scored trajectory groups
    unblocked by: the trainer
    """

    engine: Engine
    prompts: PromptStream
    rewards: Rewards
    scorer: GroupScorer
    sender: GroupSender
    tokenizer: PreTrainedTokenizerBase
    solved: Callable[[Outcome], bool]
    sampling: Sampling
    samples_per_prompt: int
    """Of a visit, those of the reference included."""
    index: int = 0
    incarnation: str = "0"
    """Short id of this start of the searcher, part of the ids of its groups; 0 where the roles take turns."""
    difficulty: Difficulty = field(default_factory=Difficulty)
    explore: Callable[[Request], Request] = lambda request: request
    """Gives some visits other sampling."""
    reference_samples: ReferenceSamples | None = None
    """Generates some of a visit's responses with the reference; None = the policy generates all."""
    step_values: StepValues | None = None
    """Estimates the value of every step's prefix by further responses; None = the objective does not need it."""
    counts: SearchCounts = field(default_factory=SearchCounts)
    _rewarded: list[tuple[FinishedGroup, list[Outcome]]] = field(default_factory=list)

    def step(self, num_prompts: int) -> None:
        """Visit the next prompts, then send their groups in the order of the prompts (synchronous mode)."""
        requests = self.prompts.take(num_prompts)
        finished = {
            (group.prompt.id, group.completions[0].sample_index): group
            for group in self._finished_groups(iter(requests), None)
        }
        in_order = [finished[request.prompt.id, request.first_sample] for request in requests]
        self._send(list(zip(in_order, score_all(self.rewards, in_order))))

    def run(self, requests: Iterator[Request | None], between_steps: Callable[[], None]) -> None:
        """Visit prompts until `requests` ends, sending each group as soon as it is scored."""
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
        self.scorer.load_reference(weights)
        if self.reference_samples is not None:
            self.reference_samples.load(weights)

    def close(self) -> None:
        """End the workers of its rewards."""
        self.rewards.close()
        if self.step_values is not None:
            self.step_values.rewards.close()

    def _finished_groups(
        self, requests: Iterator[Request | None], between_steps: Callable[[], None] | None
    ) -> Iterator[FinishedGroup]:
        """Groups, samples in order, as soon as all samples of a visit are there."""
        visited: dict[tuple[str, int], Prompt] = {}
        members: dict[tuple[str, int], list[Completion]] = {}

        def remembered() -> Iterator[Request | None]:
            for request in requests:
                if request is not None:
                    visited[request.prompt.id, request.first_sample] = request.prompt
                    request = self.explore(request)
                yield request

        others = self.reference_samples.count if self.reference_samples is not None else 0
        stream = self.engine.generate(
            remembered(),
            samples_per_prompt=self.samples_per_prompt - others,
            sampling=self.sampling,
            between_steps=between_steps,
        )
        for completion in stream:
            first_sample = completion.sample_index // self.samples_per_prompt * self.samples_per_prompt
            visit = completion.prompt_id, first_sample
            members.setdefault(visit, []).append(completion)
            if len(members[visit]) == self.samples_per_prompt - others:
                prompt, completions = visited.pop(visit), members.pop(visit)
                if self.reference_samples is not None:
                    completions += self.reference_samples(prompt, first_sample=first_sample + len(completions))
                yield self._finished(prompt, completions)

    def _finished(self, prompt: Prompt, completions: list[Completion]) -> FinishedGroup:
        completions.sort(key=lambda completion: completion.sample_index)
        self.counts.generated += 1
        self.counts.responses += len(completions)
        self.counts.tokens += sum(len(completion.token_ids) for completion in completions)
        return FinishedGroup(prompt=prompt, completions=completions, texts=texts_of(self.tokenizer, completions))

    def _send(self, scored: Sequence[tuple[FinishedGroup, list[Outcome]]]) -> None:
        if self.step_values is not None:
            scored = [self._with_step_values(self.step_values, group, outcomes) for group, outcomes in scored]
        for (group, outcomes), trajectories in zip(scored, self.scorer.trajectories(scored)):
            known = [outcome for outcome in outcomes if not isinstance(outcome, RewardFailed)]
            self.difficulty.record(group.prompt.id, [self.solved(outcome) for outcome in known])
            self.sender.send(self._group(group.prompt, trajectories, lost=len(group.completions) - len(trajectories)))
            self.counts.sent += 1

    def _with_step_values(
        self, step_values: StepValues, group: FinishedGroup, outcomes: list[Outcome]
    ) -> tuple[FinishedGroup, list[Outcome]]:
        values = step_values(self.engine, group)
        return replace(group, step_values=values), lost_without_values(outcomes, values)

    def _group(self, prompt: Prompt, trajectories: tuple[Trajectory, ...], *, lost: int) -> TrajectoryGroup:
        return TrajectoryGroup(
            id=str(GroupId(sender=f"searcher-{self.index}", incarnation=self.incarnation, number=self.counts.sent)),
            prompt=prompt,
            trajectories=trajectories,
            num_lost=lost,
            searcher=self.index,
        )
