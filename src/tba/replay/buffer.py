"""The replay buffer: add groups as they arrive, sample P prompts x K responses by the paper's mixed rule.

Read in this order: this file; selectors.py (the rules); decks.py (which prompt is next); shelf.py (one prompt's
responses); arena.py and rows.py (where the numbers lie).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from tba.config import ReplayConfig
from tba.replay.arena import WIDTH, Arena, unpack_ids
from tba.replay.decks import GroupQueue, PromptDecks
from tba.replay.packing import PackedGroup, combine_rewards, make_batch, pack_group, token_key
from tba.replay.rows import NO_LAG, AgeOrder, RowTable, TokenIndex
from tba.replay.selectors import MixedSelector, Selector, SoftmaxSelector, UniformSelector
from tba.replay.shelf import Shelf
from tba.types import Batch, Prompt, TrajectoryGroup

ScoreFunction = Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]]
"""(prompts, responses) -> reference log-probs of each response's tokens."""


class ReplayEmpty(RuntimeError):
    """Nothing is stored that could be sampled."""


class ReplayBuffer:
    """One store for all searchers; lives with the trainer, used by one thread.

    Deviation: the fresh set is the groups received in the last `fresh_steps` optimizer steps, topped up with the newest
    groups to at least P prompts. The paper takes those of the latest synchronisation; without a barrier there is none.
    """

    def __init__(
        self,
        config: ReplayConfig,
        *,
        fresh_steps: int,
        seed: int,
        reward_names: Sequence[str],
        reward_weights: Sequence[float],
        step_values: bool = False,
        truncated_reward: float | None = None,
        max_waiting_groups: int | None = None,
    ) -> None:
        """`reward_names` are the components to store; `reward_weights` combine them into the score of the softmax;
        `step_values` says whether Monte-Carlo values of step prefixes are stored too; `truncated_reward` stands for the
        score of cut-off responses, None = their own; `max_waiting_groups` bounds the queue of
        replay.max_uses, None = no bound."""
        self.config = config
        self._deduplicate = bool(config.deduplicate)
        self._capacity_per_prompt = config.capacity_per_prompt or config.capacity
        self._step_values = step_values
        self._truncated_reward = truncated_reward
        self._max_waiting_groups = max_waiting_groups
        self.fresh_steps = fresh_steps
        self.rng = np.random.Generator(np.random.PCG64(seed))
        """All randomness of sampling; `rng.bit_generator.state` restores it."""
        self.reward_names = tuple(reward_names)
        self._reward_weights = np.array(reward_weights, np.float64)
        self._group_ids: set[str] = set()
        self._next_stamp = 0
        self._arrivals: deque[tuple[int, int]] = deque()
        """(step, stamp of its first row) for the steps of the fresh window."""
        self._oldest_reference: int | None = None
        self._counts = dict.fromkeys(
            ("generated", "trained", "duplicates", "evicted", "expired", "refused", "dropped"), 0
        )
        self._ages = np.zeros(0, np.int64)
        self._clear()

    def _clear(self) -> None:
        capacity = self.config.capacity
        self._arena = Arena(capacity, width=WIDTH + self._step_values)
        self._table = RowTable(capacity, num_rewards=len(self.reward_names))
        self._order = AgeOrder(capacity)
        self._index = TokenIndex(capacity)
        self._shelves: dict[int, Shelf] = {}
        self._shelf_of: dict[tuple[str, int], Shelf] = {}
        self._decks: dict[int, PromptDecks] = {}
        """By reference version: a batch never mixes them."""
        self._next_shelf = 0
        config, table = self.config, self._table
        waiting = self._max_waiting_groups
        self._queue = None if config.max_uses is None else GroupQueue(config.max_uses, max_waiting=waiting)
        """With replay.max_uses groups are drawn in the order of their arrival."""
        self._rows_of_version: dict[int, list[int]] = {}
        """With replay.lag=drop: rows by the version that counts for their lag; rows that have left may still be listed."""
        self._selector: Selector = UniformSelector()
        if config.inverse_temperature > 0 or config.importance_weighted:
            importance = table.log_importance if config.importance_weighted else None
            self._selector = SoftmaxSelector(config.inverse_temperature, table.score, importance)
        self._mixed = MixedSelector(
            1.0 if config.on_policy_probability is None else config.on_policy_probability,
            self._selector,
            uniform_share=config.uniform_share,
            by_response=config.mix == "responses",
        )

    def __len__(self) -> int:
        """Stored responses."""
        return len(self._table)

    @property
    def num_prompts(self) -> int:
        """Prompts with a stored response."""
        if len(self._decks) <= 1:
            return len(self._shelves)
        return len({prompt_id for prompt_id, _ in self._shelf_of})

    @property
    def replay_ratio(self) -> float:
        """Trained responses / generated responses."""
        return self._counts["trained"] / max(1, self._counts["generated"])

    def add(self, group: TrajectoryGroup, *, step: int) -> int:
        """Store a group; returns how many of its responses are new rows. A group id that came before is ignored."""
        if group.id in self._group_ids:
            return 0
        if not group.trajectories:
            self._note(group)
            return 0
        packed = pack_group(group, self.reward_names, step_values=self._step_values)
        shelf = self._shelf(group.prompt, packed.reference_version)
        self._note(group)
        if self._oldest_reference is not None and packed.reference_version < self._oldest_reference:
            self._counts["refused"] += len(packed)
            return 0
        packed, keys = self._distinct(packed, shelf)
        self._make_room(packed, keys, shelf)
        self._store(packed, keys, shelf, step)
        return len(packed)

    def sample(
        self, num_prompts: int, samples_per_prompt: int, *, step: int, reference_version: int | None = None
    ) -> Batch:
        """P prompts x K responses, all of one reference version (None = the newest stored): by the mixed rule, or with
        replay.max_uses in the order of arrival. A prompt that has fewer than K fills its places with weight 0."""
        decks = self._decks_to_sample(reference_version)
        if self._queue is not None:
            chosen, used_up = self._draw_from_queue(self._queue, num_prompts, samples_per_prompt, reference_version)
        else:
            decks.refresh(self._shelves, window_start=self._window_start(step), at_least=num_prompts)
            chosen = self._mixed.choose(self._shelves, decks, num_prompts, samples_per_prompt, self.rng)
            used_up = np.zeros(0, np.int64)
        rows = np.concatenate([own for _, own in chosen])
        self._counts["trained"] += len(rows)
        self._ages = step - self._table.version[rows].astype(np.int64)
        batch = make_batch(
            chosen, samples_per_prompt, table=self._table, arena=self._arena, reward_names=self.reward_names
        )
        self._remove(used_up)
        return batch

    def can_fill(self, num_prompts: int, *, prompts_of_task: int, lost: int = 0) -> bool:
        """Whether a batch of so many prompts can be sampled; `lost` visits of it will never come. A task of fewer prompts
        repeats them within a batch."""
        if not self._decks:
            return False
        if self._queue is not None:
            wanted = max(1, num_prompts - lost)
            return self._queue.holds(wanted, self._shelves, reference_version=max(self._decks))
        return self.num_prompts + lost >= min(num_prompts, prompts_of_task)

    def expire(self, oldest_version: int) -> int:
        """Remove the responses of earlier versions (replay.lag=drop); returns how many. Imported responses and those of the
        reference have no lag and stay."""
        old = [version for version in self._rows_of_version if version < oldest_version]
        listed = [(row, version) for version in old for row in self._rows_of_version.pop(version)]
        rows = {row for row, version in listed if self._arena.holds(row) and self._table.lag_version[row] == version}
        self._remove(np.fromiter(rows, np.int64))
        self._counts["expired"] += len(rows)
        return len(rows)

    def _draw_from_queue(
        self, queue: GroupQueue, num_prompts: int, samples_per_prompt: int, reference_version: int | None
    ) -> tuple[list[tuple[Shelf, np.ndarray]], np.ndarray]:
        """The oldest groups with at most K of their responses, and all rows that have been used as often as they may."""
        version = max(self._decks) if reference_version is None else reference_version
        drawn = queue.draw(num_prompts, self._shelves, reference_version=version)
        chosen = [(shelf, self.rng.permutation(rows)[:samples_per_prompt]) for shelf, rows, _ in drawn]
        used_up = [rows for _, rows, last in drawn if last]
        return chosen, np.concatenate(used_up) if used_up else np.zeros(0, np.int64)

    def drop_reference(self, version_below: int) -> int:
        """Remove, and refuse from now on, what a reference before this version scored; returns the rows removed."""
        self._oldest_reference = max(version_below, self._oldest_reference or 0)
        shelves = [shelf for shelf in self._shelves.values() if shelf.reference_version < version_below]
        removed = sum(shelf.live for shelf in shelves)
        if removed == len(self):
            self._clear()
        else:
            for shelf in shelves:
                self._remove(shelf.rows())
        self._counts["dropped"] += removed
        return removed

    def recompute_reference(self, version: int, score: ScoreFunction) -> int:
        """Replace every log_ref by the one of the reference `version`; returns the rows rescored."""
        for shelf in self._shelves.values():
            rows = shelf.rows()
            ids = [unpack_ids(self._arena.read(np.array([row])))[0] for row in rows.tolist()]
            for row, log_ref in zip(rows.tolist(), score([shelf.prompt_tokens] * len(ids), ids)):
                self._arena.set_log_ref(row, log_ref)
            shelf.reference_version = version
        self._shelf_of = {(shelf.prompt_id, version): shelf for shelf in self._shelves.values()}
        if self._decks:
            (decks,) = self._decks.values()  # one reference at a time: a reset leaves no other behind
            self._decks = {version: decks}
        return len(self)

    def stats(self) -> dict[str, float]:
        """State of the buffer and ages (step - version) of the last sample, for the log as `buffer/*`."""
        ages = self._ages if len(self._ages) else np.zeros(1, np.int64)
        p50, p90 = np.percentile(ages, [50, 90])
        return {
            "responses": float(len(self)),
            "prompts": float(self.num_prompts),
            "tokens": float(self._arena.live_tokens),
            "replay_ratio": self.replay_ratio,
            "age_mean": float(ages.mean()),
            "age_p50": float(p50),
            "age_p90": float(p90),
            "age_max": float(ages.max()),
            **{name: float(count) for name, count in self._counts.items()},
        }

    def _note(self, group: TrajectoryGroup) -> None:
        self._group_ids.add(group.id)
        self._counts["generated"] += group.num_generated

    def _shelf(self, prompt: Prompt, reference_version: int) -> Shelf:
        """The prompt's shelf; a new one stays out of sight until something stands on it."""
        shelf = self._shelf_of.get((prompt.id, reference_version))
        if shelf is None:
            tokens = np.array(prompt.token_ids, np.int32)
            return Shelf(self._next_shelf, prompt.id, tokens, reference_version)
        if not np.array_equal(shelf.prompt_tokens, prompt.token_ids):
            raise ValueError(f"prompt {prompt.id!r} came with other tokens than before: prompt ids must be unique.")
        return shelf

    def _distinct(self, packed: PackedGroup, shelf: Shelf) -> tuple[PackedGroup, list[int]]:
        """Without copies inside the group (the last wins) and without more than fits; with a key for each response."""
        keep = np.ones(len(packed), np.bool_)
        keys: list[int] = []
        if self._deduplicate:
            ids = packed.stored_ids()
            last = {tokens.tobytes(): response for response, tokens in enumerate(ids)}
            distinct = sorted(last.values())
            keep[:] = False
            keep[distinct] = True
            keys = [token_key(ids[response], shelf.index) for response in distinct]
            self._counts["duplicates"] += len(packed) - len(distinct)
        room = min(self.config.capacity, self._capacity_per_prompt)
        too_many = max(0, int(keep.sum()) - room)
        keep[np.flatnonzero(keep)[:too_many]] = False
        return packed if keep.all() else packed.take(keep), keys[too_many:]

    def _make_room(self, packed: PackedGroup, keys: list[int], shelf: Shelf) -> None:
        """Older copies go first, then the prompt's oldest, then the oldest of all."""
        copies = self._copies(packed, keys, shelf)
        self._counts["duplicates"] += len(copies)
        self._remove(np.array(copies, np.int64), keep=shelf)
        excess = shelf.live + len(packed) - self._capacity_per_prompt
        self._evict(shelf.oldest(max(0, excess)), shelf)
        excess = len(self) + len(packed) - self.config.capacity
        self._evict(islice(self._order, max(0, excess)), shelf)

    def _copies(self, packed: PackedGroup, keys: list[int], shelf: Shelf) -> list[int]:
        """Stored rows of this shelf with the same tokens."""
        if not keys:
            return []
        return [
            row
            for key, ids in zip(keys, packed.stored_ids())
            for row in self._index.find(key)
            if self._table.shelf[row] == shelf.index and np.array_equal(self._arena.stored_ids(row), ids)
        ]

    def _evict(self, rows: Iterable[int], keep: Shelf) -> None:
        evicted = np.fromiter(rows, np.int64)
        self._counts["evicted"] += len(evicted)
        self._remove(evicted, keep=keep)

    def _remove(self, rows: np.ndarray, *, keep: Shelf | None = None) -> None:
        """Take rows out of everything; a shelf left empty goes too, except the one about to be filled."""
        if not len(rows):
            return
        slots = self._table.slot[rows].tolist()
        shelves = [self._shelves[index] for index in self._table.shelf[rows].tolist()]
        for shelf, slot in zip(shelves, slots):
            shelf.discard(slot)
        self._selector.remove(shelves, slots)
        self._order.remove(rows.tolist())
        if self._deduplicate:
            self._index.remove(rows.tolist())
        self._arena.free(rows)
        self._table.release(rows)
        for shelf in {s.index: s for s in shelves if s.live == 0 and s is not keep}.values():
            self._remove_shelf(shelf)

    def _remove_shelf(self, shelf: Shelf) -> None:
        decks = self._decks[shelf.reference_version]
        decks.remove(shelf.index)
        if not len(decks):
            del self._decks[shelf.reference_version]
        del self._shelves[shelf.index]
        del self._shelf_of[shelf.prompt_id, shelf.reference_version]

    def _store(self, packed: PackedGroup, keys: list[int], shelf: Shelf, step: int) -> None:
        rows = self._table.allocate(len(packed))
        self._arena.write(rows, packed.records, packed.lengths)
        self._write_columns(rows, packed, shelf, step)
        self._order.append(rows)
        if keys:
            self._index.insert(rows.tolist(), keys)
        self._place(rows, shelf)
        self._show(shelf)
        if not self._arrivals or self._arrivals[-1][0] < step:
            self._arrivals.append((step, self._next_stamp))
        first_stamp, self._next_stamp = self._next_stamp, self._next_stamp + len(rows)
        if self._queue is not None:
            for group in self._queue.append(shelf.index, first_stamp, self._next_stamp):
                too_old = group.rows(self._shelves)
                self._counts["expired"] += len(too_old)
                self._remove(too_old)

    def _write_columns(self, rows: np.ndarray, packed: PackedGroup, shelf: Shelf, step: int) -> None:
        table = self._table
        table.shelf[rows] = shelf.index
        table.version[rows] = packed.versions
        table.truncated[rows] = packed.truncated
        table.rewards[rows] = packed.rewards
        score = combine_rewards(packed.rewards, self._reward_weights)
        if self._truncated_reward is not None:
            score[packed.truncated] = self._truncated_reward
        table.score[rows] = score
        if self.config.importance_weighted:
            table.log_importance[rows] = packed.log_importance()
        table.received[rows] = step
        if self.config.lag == "drop":
            table.lag_version[rows] = np.where(packed.has_lag(), packed.versions, NO_LAG)
            for row, version in zip(rows.tolist(), table.lag_version[rows].tolist()):
                if version != NO_LAG:
                    self._rows_of_version.setdefault(version, []).append(row)

    def _place(self, rows: np.ndarray, shelf: Shelf) -> None:
        """Put rows on the shelf; the selector's sums follow."""
        tidied = shelf.needs_tidying(len(rows))
        if tidied:
            moved = shelf.tidy(len(rows))
            self._table.slot[moved] = np.arange(len(moved))
        slots = shelf.append(rows, self._next_stamp)
        self._table.slot[rows] = slots
        if tidied:
            self._selector.rebuild(shelf)
        else:
            self._selector.insert(shelf, slots, rows)

    def _show(self, shelf: Shelf) -> None:
        """Let the shelf be drawn: it is fresh now."""
        if shelf.index not in self._shelves:
            self._shelves[shelf.index] = shelf
            self._shelf_of[shelf.prompt_id, shelf.reference_version] = shelf
            self._next_shelf += 1
        self._decks.setdefault(shelf.reference_version, PromptDecks()).visit(shelf.index)

    def _decks_to_sample(self, reference_version: int | None) -> PromptDecks:
        if not self._decks:
            raise ReplayEmpty("the replay buffer is empty: add groups before sampling.")
        version = max(self._decks) if reference_version is None else reference_version
        if version not in self._decks:
            raise ReplayEmpty(
                f"the replay buffer holds nothing of reference version {version}, only of {sorted(self._decks)}: "
                "wait for groups scored by the current reference."
            )
        return self._decks[version]

    def _window_start(self, step: int) -> int:
        """Stamp of the first row received in the last `fresh_steps` steps; steps never go back."""
        while self._arrivals and step - self._arrivals[0][0] >= self.fresh_steps:
            self._arrivals.popleft()
        return self._arrivals[0][1] if self._arrivals else self._next_stamp
