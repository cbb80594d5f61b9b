"""Which prompt comes next: shards, seeded order, and a cursor that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from tba.types import Prompt, Request


class PromptStream:
    """An endless stream of visits to the prompts of one shard.

    Shard i of N owns prompts i, i + N, i + 2N, ... Each epoch visits all of them once, in an order drawn from
    (seed, epoch). A visit's sample indices follow those of the last visit, so randomness is never reused. Where there are
    fewer prompts than shards, shards share a prompt and take turns in its sample indices.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int,
        seed: int,
        shuffle: bool = True,
        shard: int = 0,
        num_shards: int = 1,
        cursor: int = 0,
        skips: Callable[[str], bool] = lambda prompt_id: False,
    ) -> None:
        """`skips` says which prompts to pass over; at most a whole epoch in a row."""
        self._prompts = prompts
        if not prompts:
            raise ValueError("there are no prompts to visit.")
        own = min(num_shards, len(prompts))
        self._indices = range(shard % own, len(prompts), own)
        self._turn, self._sharers = shard // own, len(range(shard % own, num_shards, own))
        self._samples_per_prompt = samples_per_prompt
        self._seed = seed
        self._shuffle = shuffle
        self._skips = skips
        self._order: tuple[int, list[int]] | None = None
        self.cursor = cursor
        """Visits so far: all the state there is."""

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        for _ in range(len(self._indices)):
            request = self._next()
            if not self._skips(request.prompt.id):
                return request
        return self._next()

    def _next(self) -> Request:
        epoch, place = divmod(self.cursor, len(self._indices))
        self.cursor += 1
        prompt = self._prompts[self._indices[self._epoch_order(epoch)[place]]]
        visit = epoch * self._sharers + self._turn
        return Request(prompt=prompt, first_sample=visit * self._samples_per_prompt)

    def take(self, count: int) -> list[Request]:
        return [next(self) for _ in range(count)]

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._draw_order(epoch))
        return self._order[1]

    def _draw_order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._indices)))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(len(self._indices), generator=generator).tolist()
