"""The searcher: explore with the weights at hand, score, send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tba.config import Config
from tba.generate.engine import Engine
from tba.runtime.channels import GroupSender
from tba.search.prompts import PromptStream
from tba.search.scoring import GroupScorer
from tba.types import Completion, Prompt, Request, Sampling, TrajectoryGroup


@dataclass
class SearchCounts:
    """What a searcher has done so far."""

    groups: int = 0
    responses: int = 0
    tokens: int = 0


@dataclass
class Searcher:
    """consumes: prompts of its shard, newer weights when there are any
    waits for: nothing
    produces: scored trajectory groups
    unblocked by: nobody
    """

    engine: Engine
    prompts: PromptStream
    scorer: GroupScorer
    sender: GroupSender
    sampling: Sampling
    samples_per_prompt: int
    index: int = 0
    counts: SearchCounts = field(default_factory=SearchCounts)

    def step(self, num_prompts: int) -> None:
        """Visit the next prompts and send their groups, in the order of the prompts."""
        requests = self.prompts.take(num_prompts)
        finished = dict(self._finished_groups(requests))
        in_order = [(request.prompt, finished[request.prompt.id]) for request in requests]
        for (prompt, completions), trajectories in zip(in_order, self.scorer.score(in_order)):
            self._count(completions)
            if trajectories:
                self.sender.send(self._group(prompt, trajectories))

    def _finished_groups(self, requests: Iterable[Request]) -> Iterator[tuple[str, list[Completion]]]:
        """(prompt id, its completions by sample index) as soon as all samples of a visit are there."""
        open_groups: dict[str, list[Completion]] = {}
        stream = self.engine.generate(requests, samples_per_prompt=self.samples_per_prompt, sampling=self.sampling)
        for completion in stream:
            members = open_groups.setdefault(completion.prompt_id, [])
            members.append(completion)
            if len(members) == self.samples_per_prompt:
                del open_groups[completion.prompt_id]
                yield completion.prompt_id, sorted(members, key=lambda member: member.sample_index)

    def _group(self, prompt: Prompt, trajectories: tuple) -> TrajectoryGroup:
        group_id = f"searcher-{self.index}/{self.counts.groups}"
        return TrajectoryGroup(id=group_id, prompt=prompt, trajectories=trajectories, searcher=self.index)

    def _count(self, completions: Sequence[Completion]) -> None:
        self.counts.groups += 1
        self.counts.responses += len(completions)
        self.counts.tokens += sum(len(completion.token_ids) for completion in completions)


def training_sampling(config: Config) -> Sampling:
    """How searchers sample: the tempered policy, truncated only where asked."""
    generate = config.generate
    return Sampling(
        max_new_tokens=generate.max_new_tokens,
        min_new_tokens=generate.min_new_tokens,
        temperature=generate.temperature,
        top_p=generate.top_p,
        top_k=generate.top_k,
    )
