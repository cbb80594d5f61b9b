"""The prompt queue draws prompts and hands rollouts out to searchers; it lives with the trainer. All prompts are drawn
once an epoch, in an order drawn from (seed, epoch)."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, order=True)
class RolloutRequest:
    """A lease for a prompt, and which of its responses to generate: RolloutRequest(number=17, prompt=4, epoch=2)"""

    number: int
    """Place among all rollouts of the run, in the order in which they were first handed out."""
    prompt: int
    epoch: int
    """Number of earlier rollouts of the prompt. Sample indices follow from it."""


class PromptQueue:
    """Keeps the holder of each rollout. Several threads use it."""

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool = True) -> None:
        if num_prompts < 1:
            raise ValueError("there are no prompts to draw.")
        self.num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, list[int]] | None = None
        self._handed_out = 0
        self._leased: dict[str, dict[int, RolloutRequest]] = {}
        """Rollouts whose group has not arrived, by holder and number."""
        self._handed_back: list[RolloutRequest] = []
        self.num_lost = 0
        """Number of rollouts that lost every response to its reward. Later rollouts fill their batches."""
        self._lock = threading.Lock()

    def lease(self, holder: str, count: int) -> list[RolloutRequest]:
        """The next rollouts for a searcher. Rollouts that another searcher did not finish come first."""
        with self._lock:
            # The earliest come first: the trainer's next batches wait for them.
            self._handed_back.sort()
            rollouts, self._handed_back = self._handed_back[:count], self._handed_back[count:]
            rollouts += [self._next() for _ in range(count - len(rollouts))]
            self._leased.setdefault(holder, {}).update((rollout.number, rollout) for rollout in rollouts)
            return rollouts

    def complete(self, number: int, *, is_lost: bool = False) -> None:
        """Close a rollout whose group has arrived, from any searcher. `is_lost`: the group has no response."""
        with self._lock:
            # A prompt queue from an older checkpoint learns here of rollouts that were handed out after it, from stored
            # groups. Such a number must not be handed out as a new one. Numbers before it are open.
            while self._handed_out <= number:
                self._handed_back.append(self._next())
            found = [rollout for rollout in self._handed_back if rollout.number == number]
            if found:
                self._handed_back.remove(found[0])
            # The sender is not known here: any searcher may hold the number, and at most one does.
            found += [rollouts.pop(number) for rollouts in self._leased.values() if number in rollouts]
            # A group that came before is not counted twice.
            self.num_lost += is_lost and bool(found)

    def hand_back(self, holder: str) -> int:
        """Take the rollouts of a searcher that has ended, for others to get. Returns their number."""
        with self._lock:
            rollouts = self._leased.pop(holder, {})
            self._handed_back += rollouts.values()
            return len(rollouts)

    @property
    def num_handed_back(self) -> int:
        """Rollouts without a holder, because their searcher is gone."""
        return len(self._handed_back)

    @property
    def outstanding(self) -> int:
        """Rollouts that a searcher holds and whose group has not arrived."""
        return sum(map(len, self._leased.values()))

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the holders of rollouts will be gone when it is read."""
        with self._lock:
            rollouts_in_flight = [rollout for rollouts in self._leased.values() for rollout in rollouts.values()]
            return {
                "handed_out": self._handed_out,
                "lost": self.num_lost,
                "open": [asdict(rollout) for rollout in sorted(rollouts_in_flight + self._handed_back)],
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._handed_out, self.num_lost = state["handed_out"], state["lost"]
            self._leased, self._handed_back = {}, [RolloutRequest(**rollout) for rollout in state["open"]]

    def _next(self) -> RolloutRequest:
        epoch, place = divmod(self._handed_out, self.num_prompts)
        if self._order is None or self._order[0] != epoch:
            order = list(range(self.num_prompts))
            if self._shuffle:
                # No two pairs of seed and epoch give one seed while a run has fewer epochs than this factor.
                generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                order = torch.randperm(self.num_prompts, generator=generator).tolist()
            self._order = (epoch, order)
        rollout = RolloutRequest(number=self._handed_out, prompt=self._order[1][place], epoch=epoch)
        self._handed_out += 1
        return rollout


class RolloutSource:
    """Stock of rollouts for a searcher, the earliest first. It asks for more before it runs out."""

    def __init__(self, ask: Callable[[int], object], *, size: int) -> None:
        """`ask` asks the trainer for so many rollouts, which arrive by `add`. `size` is the stock that is kept."""
        self._ask = ask
        self._size = size
        self._rollouts: list[RolloutRequest] = []
        self._coming = 0

    @classmethod
    def of(cls, prompt_queue: PromptQueue) -> RolloutSource:
        """Rollouts straight from the prompt queue, one at a time, where searcher and trainer take turns in one process."""
        source = cls(lambda count: source.add(prompt_queue.lease("searcher-0", count)), size=1)
        return source

    def add(self, rollouts: Sequence[RolloutRequest]) -> None:
        """Take in rollouts that were asked for, or that another searcher did not finish."""
        for rollout in rollouts:
            heapq.heappush(self._rollouts, rollout)
        # Rollouts of a searcher that has ended come unasked, so more may arrive than are counted as coming.
        self._coming = max(0, self._coming - len(rollouts))

    def peek(self) -> RolloutRequest | None:
        """The next rollout; None = the stock is empty, but more were asked for."""
        lacking = self._size - len(self._rollouts) - self._coming
        # More than half the stock is asked for at once: a message for every rollout would be too many.
        if lacking > self._size // 2:
            # `_coming` rises before the call: within one process `ask` adds the rollouts before it returns.
            self._coming += lacking
            self._ask(lacking)
        return self._rollouts[0] if self._rollouts else None

    def take(self) -> RolloutRequest:
        # Where the roles take turns the stock is empty before each rollout, and this asks for the next one.
        self.peek()
        return heapq.heappop(self._rollouts)
