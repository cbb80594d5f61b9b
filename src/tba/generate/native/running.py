"""The responses in slots: how they get there, move, finish, and are taken out where memory is short.

Responses start in the order of the requests. Where keys and values of all of them have no room, the oldest go on: prompts
that wait leave the cache first, the last before the others, then the youngest response is taken out. Its tokens are kept on
the host, and it starts again from them before anything younger does; random numbers go by the number of the token, so it
goes on as it would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch

from tba.generate.native.kv_cache import KeyValueCache
from tba.generate.native.prefill import PrefillQueue, PromptPrefill, WaitingPrompt
from tba.generate.native.slots import SlotState, SlotTable
from tba.generate.native.snapshots import FinishedSlots, SlotSnapshot
from tba.generate.sampling import Response, WrittenTokens
from tba.policy.packing import on_device
from tba.types import Completion

STEPS_OF_ROOM = 8
"""Decode steps that a response has room for when it starts."""


class RunningResponses:
    """What the host knows of the slots and does to them; `snapshots` are those that it has not taken note of yet."""

    def __init__(
        self, table: SlotTable, state: SlotState, cache: KeyValueCache, prefill: PromptPrefill, *, seed: int
    ) -> None:
        self.table, self.state, self.cache, self.prefill, self.seed = table, state, cache, prefill, seed
        self.snapshots: deque[tuple[int, SlotSnapshot]] = deque()
        """Number of decode steps before each snapshot under way, and the snapshot; the oldest first."""
        self.num_snapshots = 0
        """Number of snapshots taken so far; those under way are the last."""
        self._finished: list[FinishedSlots] = []

    def clear(self) -> None:
        """Forget all responses."""
        self.table.clear()
        self.snapshots.clear()
        self._finished.clear()
        self.state.vacate(slice(None))
        self.cache.clear()

    # --- into slots --------------------------------------------------------------------------------------------------

    def admit(self, queue: PrefillQueue, version: int, *, resumed_only: bool = False) -> None:
        """Give free slots to waiting responses, then move running ones into the gaps that remain.

        `resumed_only` leaves out those that have no token yet, as while weights wait for running responses to finish.
        """
        if queue.waiting and (not self.table.is_full() or self.prefill.is_early(queue.waiting[0])):
            waiting = queue.resumed() if resumed_only else list(queue.waiting)
            if waiting:
                self._admit(queue, waiting, version)
        self._close_gaps()

    def _admit(self, queue: PrefillQueue, waiting: list[WaitingPrompt], version: int) -> None:
        """Start responses of these prompts, the first that wait, and prefill where they are not ready."""
        # What is ready starts before more is prefilled: pages that it needs must not go to those behind it.
        self._start(queue, version, len(waiting))
        if queue.first(version) is None:
            at_once = not self.table.any_running()
            if not self.table.is_full():
                self.prefill(waiting, version, at_once=at_once)
                self._start(queue, version, len(waiting))
            elif self.prefill.is_early(waiting[0]):
                self.prefill(waiting[:1], version, at_once=at_once)
        if not self.table.any_running():
            self._refuse(waiting[0].responses[0])

    def forget_prompts(self, queue: PrefillQueue) -> None:
        """Other weights came: what waits is computed again, also where they have the number of those before, as those of a
        trainer that went back to a checkpoint."""
        while queue.give_back(num_kept=0):
            pass
        self.cache.forget_prefixes()

    def restart(self, queue: PrefillQueue, version: int) -> None:
        """Compute the prompts in slots with the weights in use, where no token was chosen yet."""
        started = [
            slot for slot, response in self.table.items() if self.table.num_tokens[slot] == response.num_prefix_tokens
        ]
        if not started:
            return
        responses = self._remove(started)
        for response in sorted(responses, key=lambda response: -response.order):
            queue.put_back(response)
        first = [prompt for prompt in queue.waiting if prompt.responses[0] in responses]
        self.prefill(first, version, at_once=not self.table.any_running())
        self._start(queue, version, len(first))
        self._close_gaps()

    def _start(self, queue: PrefillQueue, version: int, num_prompts: int) -> None:
        """Start responses of the first prompts, in order, as far as they are ready and there are slots and room."""
        started: list[tuple[int, Response]] = []
        num_running = self.table.count - len(self.table.gaps)
        last = len(queue.waiting) - num_prompts
        for slot in self.table.free_slots():
            prompt = queue.first(version) if len(queue.waiting) > last else None
            if prompt is None or not self._has_room(slot, prompt, queue, num_running + len(started)):
                break
            started.append((slot, queue.take()))
        if started:
            self._place(*zip(*started), version=version)

    def _has_room(self, slot: int, prompt: WaitingPrompt, queue: PrefillQueue, num_spare: int) -> bool:
        """Give a slot the room that a prompt's next response needs; one page for each other response stays free."""
        response = prompt.responses[0]
        while not self.cache.start(
            slot,
            prompt.stored,
            num_positions=min(response.start_position + STEPS_OF_ROOM, response.max_length),
            most_positions=response.max_length,
            is_last=len(prompt.responses) == 1,
            num_spare=num_spare,
        ):
            if not queue.give_back(num_kept=1):
                return False
        return True

    @torch.inference_mode()
    def _place(self, slots: Sequence[int], responses: Sequence[Response], *, version: int) -> None:
        self.state.reserve(max(response.sampling.max_new_tokens for response in responses))
        self.cache.flush()
        self.state.place(slots, responses, self.seed)
        for slot, response in zip(slots, responses):
            # One that was taken out goes on in its span, unless other weights came in the meantime.
            if response.written is None or response.spans[-1][1] != version:
                response.open_span(len(response.token_ids), version)
            self.table.put(slot, response, first_snapshot=self.num_snapshots)

    @torch.inference_mode()
    def _close_gaps(self) -> None:
        if self.snapshots:  # a snapshot under way knows responses by their slots
            return
        sources, targets = self.table.compact()
        if sources:
            self.cache.move(sources, targets, self.table.num_keys())
            self.state.move(*on_device(torch.tensor([sources, targets]), self.state.device))

    def _refuse(self, response: Response) -> None:
        """Raise: nothing runs, and the next response has no room even so. Memory that was counted on is gone."""
        self.cache.check_fits(response.max_length, f"prompt {response.request.prompt.id!r} with its response")
        raise RuntimeError(f"nothing runs, and prompt {response.request.prompt.id!r} cannot start: pages were lost.")

    # --- decode steps ------------------------------------------------------------------------------------------------

    def make_room(self, queue: PrefillQueue, num_steps: int) -> None:
        """Room for the next decode steps of all running responses; where there is none, for the oldest of them."""
        if not self.cache.hold(self.table, self.num_steps_under_way + num_steps):
            self._settle()
            while self.table.any_running() and not self.cache.hold(self.table, num_steps):
                if not queue.give_back(num_kept=0):
                    self._take_out(self.table.youngest(), queue)
            self._close_gaps()
        self.cache.flush()

    @property
    def num_steps_under_way(self) -> int:
        """Number of decode steps that have been started, and of which the host has not taken note."""
        return sum(steps for steps, _ in self.snapshots)

    def note_snapshot(self, num_steps: int) -> None:
        """Take a snapshot after decode steps that have been started."""
        self.snapshots.append((num_steps, self.state.snapshot(self.table.count)))
        self.num_snapshots += 1

    def synchronize(self) -> list[int]:
        """Wait until the device stands still, and bring the host's numbers up to date -> slots that are complete."""
        return self.table.update(self.state.snapshot(self.table.count).wait(), self.num_snapshots)

    def _settle(self) -> None:
        """Take note of everything that has run: finished responses give back what they hold."""
        complete = self.synchronize()
        self.snapshots.clear()
        self._finish(complete)

    @torch.inference_mode()
    def _take_out(self, slot: int, queue: PrefillQueue) -> None:
        """Take a running response out of its slot, with its tokens; the device must stand still."""
        num_tokens = int(self.table.num_tokens[slot])
        tables = self.state.fetch([slot], num_tokens).wait()
        (response,) = self._remove([slot])
        if num_tokens > response.num_prefix_tokens:
            tokens, behaviour, policy = (table[0].copy() for table in tables)
            response.written = WrittenTokens(token_ids=tokens.astype(np.int32), behaviour=behaviour, policy=policy)
        queue.put_back(response)

    # --- out of slots ------------------------------------------------------------------------------------------------

    def take_finished(self, ahead: int) -> None:
        """Take the finished responses out of their slots, by all snapshots but the last `ahead`."""
        slots: list[int] = []
        while len(self.snapshots) > ahead:
            number = self.num_snapshots - len(self.snapshots)
            _, snapshot = self.snapshots.popleft()
            # A slot that is done stays done until it is taken out, so the last snapshot names all of them.
            slots = self.table.update(snapshot.wait(), number)
        self._finish(slots)

    @property
    def all_handed_out(self) -> bool:
        """Whether no finished response is left to hand out."""
        return not self._finished

    def completions(self, stop_ids: Collection[int]) -> Iterator[Completion]:
        """The finished responses that have not been handed out; waits for their tables to arrive."""
        finished, self._finished = self._finished, []
        for slots in finished:
            yield from slots.completions(stop_ids)

    @torch.inference_mode()
    def _finish(self, slots: Sequence[int]) -> None:
        if slots:
            counts = self.table.num_tokens[slots]
            tables = self.state.fetch(slots, int(counts.max()))
            responses = [self.table.remove(slot) for slot in slots]
            self.cache.release(slots)
            self._finished.append(FinishedSlots(responses, counts, tables))

    def _remove(self, slots: Sequence[int]) -> list[Response]:
        """Responses that are not finished leave their slots."""
        responses = [self.table.remove(slot) for slot in slots]
        self.state.vacate(torch.tensor(slots, device=self.state.device))
        self.cache.release(slots)
        return responses
