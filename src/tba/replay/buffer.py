"""The replay buffer: add groups as they arrive, sample P prompts x K responses by the paper's mixed rule.

Read in this order: this file; sampling.py (the rules by which responses are drawn); prompts.py (one prompt's responses, and
which prompt is next); storage.py (where the numbers lie).

A row is the number of one stored response; an arrival number counts responses in the order in which they were stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from tba.config import ReplayConfig
from tba.replay.batching import PackedGroup, combine_rewards, make_batch, pack_group, token_keys
from tba.replay.prompts import GroupQueue, PromptDraws, PromptEntry
from tba.replay.sampling import MixedSelector, Selector, SoftmaxSelector, UniformSelector
from tba.replay.storage import NO_LAG, WIDTH, AgeOrder, RowTable, TokenIndex, TokenStore, unpack_ids
from tba.types import Batch, GroupId, HighWaterMarks, Prompt, TrajectoryGroup

ScoreFunction = Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]]
"""Token ids of prompts and of responses, one for one -> reference log-probs of each response's tokens."""


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
        """`reward_names` are the reward components to store; `reward_weights` combine them into the score that the softmax
        draws by. `step_values` says whether Monte-Carlo values of step prefixes are stored too. `truncated_reward` replaces
        the score of cut-off responses, None = they keep their own. `max_waiting_groups` bounds the queue of
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
        self._marks = HighWaterMarks()
        """Which groups have come, so that one that is sent again is ignored."""
        self._next_arrival = 0
        """Arrival number that the next stored response will have."""
        self._first_arrivals: deque[tuple[int, int]] = deque()
        """(step, arrival number of its first row) for the steps of the fresh window."""
        self._oldest_reference: int | None = None
        """Oldest reference version that is still taken, None = every one."""
        self._counts = dict.fromkeys(("duplicates", "evicted", "expired", "refused", "dropped"), 0)
        self._ages = np.zeros(0, np.int64)
        """Step - version of each response of the last sample."""
        self._clear()

    def _clear(self) -> None:
        """Begin with nothing stored; what was counted, and which groups came before, is kept."""
        capacity = self.config.capacity
        self._token_store = TokenStore(capacity, width=WIDTH + self._step_values)
        self._table = RowTable(capacity, num_rewards=len(self.reward_names))
        self._order = AgeOrder(capacity)
        self._index = TokenIndex(capacity)
        self._entries: dict[int, PromptEntry] = {}
        """Entries by index; each has at least one row."""
        self._entry_of: dict[tuple[str, int], PromptEntry] = {}
        """The same entries by prompt id and reference version."""
        self._next_entry = 0
        self._draws: dict[int, PromptDraws] = {}
        """Prompts to draw by reference version: a batch never mixes references."""
        config, table = self.config, self._table
        waiting = self._max_waiting_groups
        self._queue = None if config.max_uses is None else GroupQueue(config.max_uses, max_waiting=waiting)
        """Groups in the order of their arrival; None without replay.max_uses."""
        self._rows_of_version: dict[int, list[int]] = {}
        """Rows by the version that their lag is counted from, with replay.lag=drop. Rows that have left may still be listed:
        taking them out would cost a search for each."""
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
        """Number of stored responses."""
        return len(self._table)

    @property
    def num_prompts(self) -> int:
        """Number of prompts with a stored response."""
        # Under two references at a time a prompt has two entries.
        if len(self._draws) <= 1:
            return len(self._entries)
        return len({prompt_id for prompt_id, _ in self._entry_of})

    def has_received(self, group_id: str) -> bool:
        """Whether a group of this id came before, also where none of its responses is stored."""
        return self._marks.passed(GroupId.parse(group_id))

    @property
    def marks(self) -> HighWaterMarks:
        """Which groups have come."""
        return self._marks

    def add(self, group: TrajectoryGroup, *, step: int) -> int:
        """Store a group that arrived at an optimizer step; returns the number of its responses that were stored. A group id
        that came before is ignored. Responses of a version after that step, which a trainer that died had published, count
        as of the step: their weights are gone, and no lag is negative."""
        group_id = GroupId.parse(group.id)
        if self._marks.passed(group_id):
            return 0
        if not group.trajectories:
            self._marks.raise_to(group_id)
            return 0
        # What may raise comes before anything is changed: a group that is wrong leaves the buffer as it was.
        packed = pack_group(group, self.reward_names, step_values=self._step_values).as_of(step)
        entry = self._find_entry(group.prompt, packed.reference_version)
        self._marks.raise_to(group_id)
        if self._oldest_reference is not None and packed.reference_version < self._oldest_reference:
            self._counts["refused"] += len(packed)
            return 0
        packed, keys = self._distinct(packed, entry)
        self._evict_for(packed, keys, entry)
        self._store(packed, keys, entry, step)
        return len(packed)

    def sample(
        self, num_prompts: int, samples_per_prompt: int, *, step: int, reference_version: int | None = None
    ) -> Batch:
        """P prompts x K responses, all of one reference version (None = the newest stored), by the mixed rule, or with
        replay.max_uses in the order of arrival. A prompt that has fewer than K fills its places with weight 0."""
        version = self._version_to_sample(reference_version)
        if self._queue is not None:
            chosen, used_up = self._draw_from_queue(self._queue, num_prompts, samples_per_prompt, version)
        else:
            draws = self._draws[version]
            draws.refresh(self._entries, window_start=self._window_start(step), at_least=num_prompts)
            chosen = self._mixed.choose(self._entries, draws, num_prompts, samples_per_prompt, self.rng)
            used_up = np.zeros(0, np.int64)
        rows = np.concatenate([own for _, own in chosen])
        self._ages = step - self._table.version[rows].astype(np.int64)
        batch = make_batch(
            chosen,
            samples_per_prompt,
            table=self._table,
            token_store=self._token_store,
            reward_names=self.reward_names,
        )
        self._remove(used_up)  # only now: the batch was copied out of these rows
        return batch

    @property
    def num_waiting(self) -> int:
        """Number of groups in the queue of replay.max_uses."""
        return 0 if self._queue is None else len(self._queue)

    def can_fill(self, num_prompts: int, *, prompts_of_task: int, lost: Collection[str] = ()) -> bool:
        """Whether a batch of so many prompts can be sampled. A task of fewer prompts repeats them within a batch, and those
        of its prompts that were `lost` to their reward, by their ids, are not waited for."""
        if not self._draws:
            return False
        if self._queue is not None:
            return self._queue.holds(num_prompts, self._entries, reference_version=max(self._draws))
        if self.num_prompts >= min(num_prompts, prompts_of_task):
            return True
        if prompts_of_task - len(lost) >= num_prompts:
            return False  # enough others are there to come
        # Some reward may fail on a prompt at every visit: waiting for it would never end.
        stored = {prompt_id for prompt_id, _ in self._entry_of}
        return len(stored.union(lost)) >= prompts_of_task

    def expire(self, oldest_version: int) -> int:
        """Remove the responses of earlier versions (replay.lag=drop); returns their number. Imported responses and those of
        the reference have no lag and stay."""
        old = [version for version in self._rows_of_version if version < oldest_version]
        listed = [(row, version) for version in old for row in self._rows_of_version.pop(version)]
        # A listed row may have left, and may have been given to a response of another version since.
        rows = {
            row for row, version in listed if self._token_store.holds(row) and self._table.lag_version[row] == version
        }
        self._remove(np.fromiter(rows, np.int64))
        self._counts["expired"] += len(rows)
        return len(rows)

    def drop_reference(self, version_below: int) -> int:
        """Remove, and refuse from now on, what a reference before this version scored; returns the number of responses
        removed."""
        self._oldest_reference = max(version_below, self._oldest_reference or 0)
        entries = [entry for entry in self._entries.values() if entry.reference_version < version_below]
        removed = sum(entry.num_rows for entry in entries)
        # Mostly everything goes: beginning anew gives all memory back, and touches no row.
        if removed == len(self):
            self._clear()
        else:
            for entry in entries:
                self._remove(entry.rows())
        self._counts["dropped"] += removed
        return removed

    def recompute_reference(self, version: int, score: ScoreFunction) -> int:
        """Replace every log_ref by the one of the reference `version`; returns the number of responses scored anew."""
        for entry in self._entries.values():
            rows = entry.rows()
            ids = [unpack_ids(self._token_store.read(np.array([row])))[0] for row in rows.tolist()]
            for row, log_ref in zip(rows.tolist(), score([entry.prompt_tokens] * len(ids), ids)):
                self._token_store.set_log_ref(row, log_ref)
            entry.reference_version = version
        self._entry_of = {(entry.prompt_id, version): entry for entry in self._entries.values()}
        if self._draws:
            (draws,) = self._draws.values()  # one reference at a time: a reset leaves no other behind
            self._draws = {version: draws}
        return len(self)

    def stats(self) -> dict[str, float]:
        """State of the buffer and ages (step - version) of the last sample, for the log as `buffer/*`."""
        ages = self._ages if len(self._ages) else np.zeros(1, np.int64)
        p50, p90 = np.percentile(ages, [50, 90])
        return {
            "responses": float(len(self)),
            "prompts": float(self.num_prompts),
            "tokens": float(self._token_store.live_tokens),
            "age_mean": float(ages.mean()),
            "age_p50": float(p50),
            "age_p90": float(p90),
            "age_max": float(ages.max()),
            **{name: float(count) for name, count in self._counts.items()},
        }

    def state(self) -> dict[str, Any]:
        """What is stored, in which order it will be drawn, what was counted, and the random state: everything but the
        settings."""
        return {name: value for name, value in vars(self).items() if name != "config"}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a buffer with the same settings: later draws are those that it would have made."""
        vars(self).update(state)

    def _find_entry(self, prompt: Prompt, reference_version: int) -> PromptEntry:
        """The prompt's entry. A new one is not registered before it has a row: what follows may still raise or refuse."""
        entry = self._entry_of.get((prompt.id, reference_version))
        if entry is None:
            tokens = np.array(prompt.token_ids, np.int32)
            return PromptEntry(self._next_entry, prompt.id, tokens, reference_version)
        if not np.array_equal(entry.prompt_tokens, prompt.token_ids):
            raise ValueError(f"prompt {prompt.id!r} came with other tokens than before: prompt ids must be unique.")
        return entry

    def _distinct(self, packed: PackedGroup, entry: PromptEntry) -> tuple[PackedGroup, list[int]]:
        """The group without copies inside it (the last one stays) and without more than fits, and a key for each response
        (none without deduplication)."""
        keep = np.ones(len(packed), np.bool_)
        keys: list[int] = []
        if self._deduplicate:
            ids = packed.stored_bytes()
            last = {tokens: response for response, tokens in enumerate(ids)}
            distinct = sorted(last.values())
            keep[:] = False
            keep[distinct] = True
            keys = token_keys([ids[response] for response in distinct], entry.index)
            self._counts["duplicates"] += len(packed) - len(distinct)
        # A group larger than a capacity would evict its own responses; the last of them stay, as of equal ones.
        most = min(self.config.capacity, self._capacity_per_prompt)
        too_many = max(0, int(keep.sum()) - most)
        keep[np.flatnonzero(keep)[:too_many]] = False
        return packed if keep.all() else packed.take(keep), keys[too_many:]

    def _evict_for(self, packed: PackedGroup, keys: list[int], entry: PromptEntry) -> None:
        """Remove what the group replaces or leaves no capacity for: older copies first, then the prompt's oldest, then the
        oldest of all. In another order copies would count twice against a capacity, and others would leave for them."""
        copies = self._copies(packed, keys, entry)
        self._counts["duplicates"] += len(copies)
        self._remove(np.array(copies, np.int64), keep=entry)
        excess = entry.num_rows + len(packed) - self._capacity_per_prompt
        self._evict(entry.oldest(max(0, excess)), entry)
        excess = len(self) + len(packed) - self.config.capacity
        self._evict(islice(self._order, max(0, excess)), entry)

    def _copies(self, packed: PackedGroup, keys: list[int], entry: PromptEntry) -> list[int]:
        """Stored rows of this entry with the same tokens as a response of the group."""
        if not keys:
            return []
        ids = packed.stored_bytes()
        return [
            row
            for response, row in self._index.find(keys)
            if self._table.entry[row] == entry.index and self._token_store.stored_ids(row).tobytes() == ids[response]
        ]

    def _evict(self, rows: Iterable[int], keep: PromptEntry) -> None:
        evicted = np.fromiter(rows, np.int64)  # collected first: the order may not change while it is walked through
        self._counts["evicted"] += len(evicted)
        self._remove(evicted, keep=keep)

    def _remove(self, rows: np.ndarray, *, keep: PromptEntry | None = None) -> None:
        """Take rows out of everything; an entry left empty goes too, except the one about to be filled."""
        if not len(rows):
            return
        positions: dict[int, list[int]] = {}
        for index, position in zip(self._table.entry[rows].tolist(), self._table.position[rows].tolist()):
            positions.setdefault(index, []).append(position)
        freed = [(self._entries[index], own) for index, own in positions.items()]
        for entry, own in freed:
            entry.discard(own)
        self._selector.remove(freed)  # after every discard: it looks at which entries are empty now
        self._order.remove(rows.tolist())
        if self._deduplicate:
            self._index.remove(rows.tolist())
        self._token_store.free(rows)
        self._table.release(rows)
        for entry, _ in freed:
            if entry.num_rows == 0 and entry is not keep:
                self._remove_entry(entry)

    def _remove_entry(self, entry: PromptEntry) -> None:
        draws = self._draws[entry.reference_version]
        draws.remove(entry.index)
        if not len(draws):
            del self._draws[entry.reference_version]
        del self._entries[entry.index]
        del self._entry_of[entry.prompt_id, entry.reference_version]

    def _store(self, packed: PackedGroup, keys: list[int], entry: PromptEntry, step: int) -> None:
        rows = self._table.allocate(len(packed))
        # Columns come before `_append`: the selector makes its sums from the scores.
        self._token_store.write(rows, packed.records, packed.lengths)
        self._write_columns(rows, packed, entry)
        self._order.append(rows)
        if keys:
            self._index.insert(rows.tolist(), keys)
        self._append(rows, entry)
        self._register(entry)
        if not self._first_arrivals or self._first_arrivals[-1][0] < step:
            self._first_arrivals.append((step, self._next_arrival))
            self._window_start(step)  # forgets steps that are no longer fresh: a queue never asks
        first_arrival, self._next_arrival = self._next_arrival, self._next_arrival + len(rows)
        if self._queue is not None:
            for group in self._queue.append(entry.index, first_arrival, self._next_arrival):
                too_old = group.rows(self._entries)
                self._counts["expired"] += len(too_old)
                self._remove(too_old)

    def _write_columns(self, rows: np.ndarray, packed: PackedGroup, entry: PromptEntry) -> None:
        table = self._table
        table.entry[rows] = entry.index
        table.version[rows] = packed.versions
        table.truncated[rows] = packed.truncated
        table.rewards[rows] = packed.rewards
        score = combine_rewards(packed.rewards, self._reward_weights)
        if self._truncated_reward is not None:
            score[packed.truncated] = self._truncated_reward
        table.score[rows] = score
        if self.config.importance_weighted:
            table.log_importance[rows] = packed.log_importance()
        if self.config.lag == "drop":
            table.lag_version[rows] = np.where(packed.has_lag(), packed.versions, NO_LAG)
            for row, version in zip(rows.tolist(), table.lag_version[rows].tolist()):
                if version != NO_LAG:
                    self._rows_of_version.setdefault(version, []).append(row)

    def _append(self, rows: np.ndarray, entry: PromptEntry) -> None:
        """List rows in their entry; the selector's sums follow."""
        # Compacting moves rows to other positions, and the columns and the selector must follow.
        compacted = entry.needs_compacting(len(rows))
        if compacted:
            moved = entry.compact(len(rows))
            self._table.position[moved] = np.arange(len(moved))
        positions = entry.append(rows, self._next_arrival)
        self._table.position[rows] = positions
        if compacted:
            self._selector.rebuild(entry)
        else:
            self._selector.insert(entry, positions, rows)

    def _register(self, entry: PromptEntry) -> None:
        """Let the entry be drawn: it is fresh now."""
        if entry.index not in self._entries:
            self._entries[entry.index] = entry
            self._entry_of[entry.prompt_id, entry.reference_version] = entry
            self._next_entry += 1
        self._draws.setdefault(entry.reference_version, PromptDraws()).visit(entry.index)

    def _version_to_sample(self, reference_version: int | None) -> int:
        if not self._draws:
            raise ReplayEmpty("the replay buffer is empty: add groups before sampling.")
        version = max(self._draws) if reference_version is None else reference_version
        if version not in self._draws:
            raise ReplayEmpty(
                f"the replay buffer holds nothing of reference version {version}, only of {sorted(self._draws)}: "
                "wait for groups scored by the current reference."
            )
        return version

    def _draw_from_queue(
        self, queue: GroupQueue, num_prompts: int, samples_per_prompt: int, reference_version: int
    ) -> tuple[list[tuple[PromptEntry, np.ndarray]], np.ndarray]:
        """The oldest groups with at most K of their responses, and all rows that have been used as often as they may be."""
        drawn = queue.draw(num_prompts, self._entries, reference_version=reference_version)
        # A random choice, not the first K: what is trained must not depend on a response's place in its group.
        chosen = [(entry, self.rng.permutation(rows)[:samples_per_prompt]) for entry, rows, _ in drawn]
        used_up = [rows for _, rows, last in drawn if last]
        return chosen, np.concatenate(used_up) if used_up else np.zeros(0, np.int64)

    def _window_start(self, step: int) -> int:
        """Arrival number of the first row received in the last `fresh_steps` steps; steps never go back."""
        while self._first_arrivals and step - self._first_arrivals[0][0] >= self.fresh_steps:
            self._first_arrivals.popleft()
        return self._first_arrivals[0][1] if self._first_arrivals else self._next_arrival
