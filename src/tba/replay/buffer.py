"""The replay buffer. Read in this order: this file; draw.py (one prompt's responses, and the rules by which a batch is
chosen); batching.py (what is stored of a group, and how a batch is made of it).

An arrival number counts responses in the order in which they were stored, and names a response for good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tba.config import ReplayConfig
from tba.replay.batching import PackedGroup, combine_rewards, cut, make_batch, pack_group, unpack_ids
from tba.replay.draw import BufferedGroup, GroupQueue, PromptDraws, PromptEntry, mixed_choice
from tba.types import Batch, GroupId, HighWaterMarks, Prompt, TrajectoryGroup

ScoreFunction = Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]]
"""Token ids of prompts and of responses, one for one -> reference log-probs of each response's tokens."""
NO_VERSION = 2**31 - 1
"""Version of responses that have no lag: none is as new."""


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
        uses_per_group: int | None = None,
        max_waiting_groups: int | None = None,
    ) -> None:
        """`reward_weights` combine the reward components into the score that the softmax draws by. `step_values`:
        whether Monte-Carlo values of step prefixes are stored. `truncated_reward` replaces the score of cut-off
        responses, None = they keep their own. `uses_per_group` is the number of draws after which a group leaves the
        queue, None = there is no queue, and `max_waiting_groups` bounds it."""
        self.config = config
        self.fresh_steps = fresh_steps
        self.rng = np.random.Generator(np.random.PCG64(seed))
        """All randomness of sampling; `rng.bit_generator.state` restores it."""
        self.reward_names = tuple(reward_names)
        self._reward_weights = np.array(reward_weights, np.float64)
        self._step_values = step_values
        self._truncated_reward = truncated_reward
        self._capacity_per_prompt = config.capacity_per_prompt or config.capacity
        self._queue = None if uses_per_group is None else GroupQueue(uses_per_group, max_waiting=max_waiting_groups)
        self._entries: dict[int, PromptEntry] = {}
        self._entry_of: dict[tuple[str, int], PromptEntry] = {}
        """The same entries by prompt id and reference version."""
        self._groups: deque[BufferedGroup] = deque()
        """All groups, oldest first; those whose responses have all left may still be listed."""
        self._draws: dict[int, PromptDraws] = {}
        """Prompts to draw by reference version: a batch never mixes references."""
        self._first_arrivals: deque[tuple[int, int]] = deque()
        """(step, arrival number of its first response) for the steps of the fresh window."""
        self.marks = HighWaterMarks()
        """Which groups have come, so that one that is sent again is ignored."""
        self._next_arrival = self._next_entry = 0
        """Arrival number of the next response, index of the next entry."""
        self._num_responses = self._num_tokens = 0
        self._oldest_reference: int | None = None
        """Oldest reference version that is still taken, None = every one."""
        self._counts = dict.fromkeys(("duplicates", "evicted", "expired", "refused", "dropped"), 0)
        self._ages = np.zeros(0, np.int64)
        """Step - version of each response of the last sample."""

    def __len__(self) -> int:
        return self._num_responses

    @property
    def num_prompts(self) -> int:
        # Under two references at a time a prompt has two entries.
        if len(self._draws) <= 1:
            return len(self._entries)
        return len({prompt_id for prompt_id, _ in self._entry_of})

    def add(self, group: TrajectoryGroup, *, step: int) -> int:
        """Store a group; returns the number of its responses that were stored. A group id that came before is ignored.
        Responses of a version after that step, which a trainer that died had published, count as of the step."""
        group_id = GroupId.parse(group.id)
        if self.marks.passed(group_id):
            return 0
        if not group.trajectories:
            self.marks.raise_to(group_id)
            return 0
        # What may raise comes before anything is changed: a group that is wrong leaves the buffer as it was.
        packed = pack_group(group, self.reward_names, step_values=self._step_values)
        entry = self._entry_of.get((group.prompt.id, packed.reference_version))
        if entry is None:  # it is registered once it has a response: what follows may still raise or refuse
            entry = self._make_entry(self._next_entry, group.prompt, packed.reference_version)
        elif not np.array_equal(entry.prompt_tokens, group.prompt.token_ids):
            raise ValueError(
                f"prompt {group.prompt.id!r} came with other tokens than before: prompt ids must be unique."
            )
        # The mark rises for a refused group too: it has come, and a copy of it is to be ignored.
        self.marks.raise_to(group_id)
        if self._oldest_reference is not None and packed.reference_version < self._oldest_reference:
            self._counts["refused"] += len(packed)
            return 0
        keep = list(range(len(packed)))
        if self.config.deduplicate:  # the last of equal responses stays
            keep = sorted({tokens: response for response, tokens in enumerate(packed.ids)}.values())
            self._counts["duplicates"] += len(packed) - len(keep)
        # A group larger than a capacity would evict its own responses; the last of them stay, as of equal ones.
        packed = packed.take(keep[-min(self.config.capacity, self._capacity_per_prompt) :])
        self._make_room(packed, entry)
        self._store(packed, entry, step)
        return len(packed)

    def sample(
        self, num_prompts: int, samples_per_prompt: int, *, step: int, reference_version: int | None = None
    ) -> Batch:
        """P prompts x K responses, all of one reference version (None = the newest stored), by the mixed rule, or with
        a queue in the order of arrival. A prompt that has fewer than K fills its places with weight 0."""
        if not self._draws:
            raise ReplayEmpty("the replay buffer is empty: add groups before sampling.")
        version, K = max(self._draws) if reference_version is None else reference_version, samples_per_prompt
        if version not in self._draws:
            raise ReplayEmpty(
                f"the replay buffer holds nothing of reference version {version}, only of {sorted(self._draws)}: "
                "wait for groups scored by the current reference."
            )
        used_up: list[BufferedGroup] = []
        if self._queue is not None:
            chosen, used_up = self._queue.choose(num_prompts, K, self.rng, reference_version=version)
        else:
            draws = self._draws[version]
            newest_first = (group.entry.index for group in reversed(self._groups))
            start = self._window_start(step)
            draws.refresh(self._entries, newest_first, window_start=start, at_least=num_prompts)
            share = 1.0 if self.config.on_policy_probability is None else self.config.on_policy_probability
            chosen = mixed_choice(self._entries, num_prompts, K, self.rng, draws=draws, on_policy_probability=share)
        self._ages = step - np.concatenate([entry.columns["version"][own] for entry, own in chosen]).astype(np.int64)
        batch = make_batch(chosen, K, reward_names=self.reward_names)
        for group in used_up:  # only now: the batch was copied out of them
            self._remove_group(group)
        return batch

    def can_fill(self, num_prompts: int, *, prompts_of_task: int, lost: Collection[str] = ()) -> bool:
        """Whether a batch of so many prompts can be sampled. A task of fewer prompts repeats them within a batch, and
        those of its prompts that were `lost` to their reward, by their ids, are not waited for."""
        if not self._draws:
            return False
        if self._queue is not None:
            return self._queue.holds(num_prompts, reference_version=max(self._draws))
        if self.num_prompts >= min(num_prompts, prompts_of_task):
            return True
        if prompts_of_task - len(lost) >= num_prompts:
            return False  # enough others are there to come
        # Some reward may fail on a prompt in every rollout: waiting for it would never end.
        stored = {prompt_id for prompt_id, _ in self._entry_of}
        return len(stored.union(lost)) >= prompts_of_task

    def expire(self, oldest_version: int) -> int:
        """Remove the responses of earlier versions (replay.max_lag); returns their number. Imported ones and those of
        the reference have no lag and stay."""
        before = len(self)
        # Group by group: this is asked at every step, and most groups are young enough to be passed by their number alone.
        for group in self._groups:
            if group.oldest_version < oldest_version and len(positions := group.positions):
                has_lag, version = (group.entry.columns[name][positions] for name in ("has_lag", "version"))
                self._remove(group.entry, positions[has_lag & (version < oldest_version)])
        self._counts["expired"] += before - len(self)
        return before - len(self)

    def drop_reference(self, version_below: int) -> int:
        """Remove, and refuse from now on, what a reference before this version scored; returns the number removed."""
        self._oldest_reference = max(version_below, self._oldest_reference or 0)
        before = len(self)
        # The entries are listed first: those left empty leave the dict meanwhile.
        for entry in [entry for entry in self._entries.values() if entry.reference_version < version_below]:
            self._remove(entry, np.arange(len(entry)))
        if self._queue is not None:
            # Empty groups count against the queue's bound and would crowd out new ones.
            self._queue.groups = deque(group for group in self._queue.groups if len(group.positions))
        self._counts["dropped"] += before - len(self)
        return before - len(self)

    def recompute_reference(self, version: int, score: ScoreFunction) -> int:
        """Replace every log_ref by the one of the reference `version`; returns the number of responses scored anew."""
        for entry in self._entries.values():
            ids = [unpack_ids(own)[0] for own in entry.ids]
            for position, log_ref in enumerate(score([entry.prompt_tokens] * len(ids), ids)):
                # Column 0 is log_ref (PackedGroup.floats). Bytes cannot be changed, so a copy takes their place.
                floats = np.frombuffer(entry.floats[position], np.float32).reshape(len(log_ref), -1).copy()
                floats[:, 0] = log_ref
                entry.floats[position] = floats.tobytes()
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
        found: dict[str, Any] = {"responses": len(self), "prompts": self.num_prompts, "tokens": self._num_tokens}
        found |= {"age_mean": ages.mean(), "age_p50": p50, "age_p90": p90, "age_max": ages.max(), **self._counts}
        return {name: float(value) for name, value in found.items()}

    def state(self) -> dict[str, Any]:
        """Everything but the settings. Responses of all prompts lie end to end: a few large arrays are written faster
        than many small ones."""
        entries = list(self._entries.values())
        ids = [own for entry in entries for own in entry.ids]
        # `logit` follows from the scores and the settings: `load_state` computes it again.
        names = [name for name in entries[0].columns if name != "logit"] if entries else []
        return {
            **{name: getattr(self, name) for name in STATE},
            "entries": [
                (e.index, e.prompt_id, e.reference_version, e.newest_group_arrival, len(e), len(e.prompt_tokens))
                for e in entries
            ],
            "prompt_tokens": np.concatenate([entry.prompt_tokens for entry in entries]) if entries else None,
            "columns": {name: np.concatenate([entry.columns[name] for entry in entries]) for name in names},
            "lengths": np.array([len(own) // 4 for own in ids], np.int64),
            "ids": bytearray().join(ids),
            "floats": bytearray().join([own for entry in entries for own in entry.floats]),
            "groups": _numbers(self._groups),
            "queue": None if self._queue is None else _numbers(self._queue.groups),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; with the settings of the buffer it is of, later draws are those that it would have made."""
        for name in STATE:
            setattr(self, name, state[name])
        columns = self._with_logits(state["columns"])
        ids, floats = (cut(bytes(state[name]), state["lengths"]) for name in ("ids", "floats"))
        self._entries, self._entry_of, first, first_token = {}, {}, 0, 0
        # `first` and `first_token` run along the arrays, in which the entries lie end to end.
        for index, prompt_id, reference_version, newest_group_arrival, num_responses, num_tokens in state["entries"]:
            own, prompt_tokens = slice(first, first + num_responses), slice(first_token, first_token + num_tokens)
            prompt = Prompt(id=prompt_id, token_ids=state["prompt_tokens"][prompt_tokens], text="")
            entry = self._make_entry(index, prompt, reference_version)
            # Copies: a view would keep the memory of all prompts for as long as one response of this one stays.
            entry.append(ids[own], floats[own], {name: column[own].copy() for name, column in columns.items()})
            entry.newest_group_arrival = newest_group_arrival
            self._entries[index] = self._entry_of[prompt_id, reference_version] = entry
            first, first_token = own.stop, prompt_tokens.stop
        self._groups = self._groups_of(state["groups"])
        if self._queue is not None:
            # A state of a buffer without a queue: all its groups wait, the oldest first.
            self._queue.groups = self._groups_of(state["groups"] if state["queue"] is None else state["queue"])

    def _groups_of(self, numbers: np.ndarray) -> deque[BufferedGroup]:
        gone = PromptEntry(-1, "", np.zeros(0, np.int32), 0)  # of groups whose responses have all left
        return deque(BufferedGroup(self._entries.get(entry, gone), *other) for entry, *other in numbers.tolist())

    def _make_entry(self, index: int, prompt: Prompt, reference_version: int) -> PromptEntry:
        tokens = np.array(prompt.token_ids, np.int32)
        arrival_of: dict[bytes, int] | None = {} if self.config.deduplicate else None
        return PromptEntry(index, prompt.id, tokens, reference_version, arrival_of=arrival_of)

    def _make_room(self, packed: PackedGroup, entry: PromptEntry) -> None:
        """Remove what the group replaces or leaves no capacity for: older copies first, then the prompt's oldest, then
        the oldest of all. In another order copies would count twice against a capacity, and others would leave for
        them."""
        if entry.arrival_of:
            copies = [entry.arrival_of[own] for own in packed.ids if own in entry.arrival_of]
            self._counts["duplicates"] += len(copies)
            self._remove(entry, entry.columns["arrival"].searchsorted(copies), keep=entry)
        self._evict(entry, len(entry) + len(packed) - self._capacity_per_prompt, keep=entry)
        while (excess := len(self) + len(packed) - self.config.capacity) > 0:
            # The oldest group may have no response left: it then only leaves the list.
            oldest = self._groups[0]
            num_stored = len(oldest.positions)
            if num_stored <= excess:
                self._groups.popleft()
            if num_stored:  # they are the oldest of their entry
                self._evict(oldest.entry, min(excess, num_stored), keep=entry)

    def _evict(self, entry: PromptEntry, count: int, *, keep: PromptEntry) -> None:
        self._counts["evicted"] += max(0, count)
        self._remove(entry, np.arange(count), keep=keep)

    def _remove_group(self, group: BufferedGroup) -> None:
        # Its positions are looked up now: they move when another group of its prompt leaves.
        self._remove(group.entry, group.positions)

    def _remove(self, entry: PromptEntry, positions: np.ndarray, *, keep: PromptEntry | None = None) -> None:
        if not len(positions):
            return
        self._num_tokens -= entry.discard(positions)
        self._num_responses -= len(positions)
        if not len(entry) and entry is not keep:
            draws = self._draws[entry.reference_version]
            draws.remove(entry.index)
            if not len(draws.all):
                del self._draws[entry.reference_version]
            del self._entries[entry.index]
            del self._entry_of[entry.prompt_id, entry.reference_version]

    def _store(self, packed: PackedGroup, entry: PromptEntry, step: int) -> None:
        first, end = self._next_arrival, self._next_arrival + len(packed)
        columns = dict(packed.columns)
        # Arrival numbers rise with the positions in an entry: `since` and `between` search them by bisection.
        columns["arrival"] = np.arange(first, end)
        # What a trainer that died had published is no weights of this one: no response is younger than the step.
        columns["version"] = version = np.minimum(columns["version"], step)
        columns["score"] = score = combine_rewards(columns["rewards"], self._reward_weights)
        if self._truncated_reward is not None:
            score[columns["truncated"]] = self._truncated_reward
        entry.append(packed.ids, packed.floats, self._with_logits(columns))
        self._next_arrival = end
        self._num_responses += len(packed)
        # Stored ids are int32, four bytes for each token.
        self._num_tokens += sum(map(len, packed.ids)) // 4
        if entry.index not in self._entries:
            self._entries[entry.index] = entry
            self._entry_of[entry.prompt_id, entry.reference_version] = entry
            self._next_entry += 1
        self._draws.setdefault(entry.reference_version, PromptDraws()).note_arrival(entry.index)
        if not self._first_arrivals or self._first_arrivals[-1][0] < step:
            self._first_arrivals.append((step, first))
            self._window_start(step)  # forgets steps that are no longer fresh: a queue never asks
        oldest_version = int(version.min(where=columns["has_lag"], initial=NO_VERSION))
        group = BufferedGroup(entry, first, end, oldest_version)
        self._groups.append(group)
        while not len(self._groups[0].positions):
            self._groups.popleft()
        if len(self._groups) > 2 * len(self) + 64:  # an old response may stay while thousands of groups behind it leave
            self._groups = deque(each for each in self._groups if len(each.positions))
        for crowded_out in [] if self._queue is None else self._queue.append(group):
            before = len(self)
            self._remove_group(crowded_out)
            self._counts["expired"] += before - len(self)

    def _with_logits(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The columns, and the logits that weighted draws go by."""
        config = self.config
        if not columns or not (config.inverse_temperature > 0 or config.importance_weighted):
            return dict(columns)
        logit = config.inverse_temperature * columns["score"].astype(np.float64)
        return {**columns, "logit": logit + columns["log_importance"] * config.importance_weighted}

    def _window_start(self, step: int) -> int:
        """Arrival number of the first response received in the last `fresh_steps` steps; steps never go back."""
        while self._first_arrivals and step - self._first_arrivals[0][0] >= self.fresh_steps:
            self._first_arrivals.popleft()
        return self._first_arrivals[0][1] if self._first_arrivals else self._next_arrival


def _numbers(groups: Collection[BufferedGroup]) -> np.ndarray:
    numbers = [(group.entry.index, group.first, group.end, group.oldest_version, group.uses) for group in groups]
    return np.array(numbers, np.int64).reshape(-1, 5)


STATE = (
    *("rng", "marks", "_draws", "_first_arrivals", "_oldest_reference", "_counts", "_ages"),
    *("_next_arrival", "_next_entry", "_num_responses", "_num_tokens"),
)
