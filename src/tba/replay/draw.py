"""The draw of a batch. GroupQueue takes groups in the order of their arrival, and `mixed_choice` draws by the paper's
rule.

A choice is, for each of the P places in the batch, a prompt's entry and the positions of at most K of its responses, drawn
without replacement: a response that came twice would weigh twice, and the loss of a short group is exact without it.

A prompt is named by the index of its entry, so that one prompt under two reference versions is two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np

UNIFORM_SHARE = 0.5
"""Share of the old responses of a batch of one prompt that is drawn uniformly where the others are drawn by weight."""
NOTHING = np.zeros(0, np.int64)


@dataclass(eq=False, slots=True)
class PromptEntry:
    """The stored responses of one prompt under one reference version, oldest to newest."""

    index: int
    prompt_id: str
    prompt_tokens: np.ndarray
    reference_version: int
    ids: list[bytes] = field(default_factory=list)
    floats: list[bytes] = field(default_factory=list)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """By position: as in `PackedGroup`, with `arrival`, `score`, and `logit` where old responses are drawn by weight."""
    arrival_of: dict[bytes, int] | None = None
    """Arrival number by token ids; None without deduplication."""
    newest_group_arrival: int = 0
    """Arrival number of the first response of the newest group."""

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, ids: Sequence[bytes], floats: Sequence[bytes], columns: Mapping[str, np.ndarray]) -> None:
        if self.arrival_of is not None:
            # The newest of equal responses is listed: the buffer has removed the older ones (`_make_room`).
            self.arrival_of.update(zip(ids, columns["arrival"].tolist()))
        self.ids += ids
        self.floats += floats
        # This holds for one group; `load_state`, which adds several at once, sets the number itself.
        self.newest_group_arrival = int(columns["arrival"][0])
        held = self.columns
        joined = {name: np.concatenate([held[name], values]) for name, values in columns.items()} if held else columns
        self.columns = dict(joined)

    def discard(self, positions: np.ndarray) -> int:
        """Remove the responses at these positions, at least one and none twice; returns their number of tokens."""
        removed = [self.ids[position] for position in positions.tolist()]
        if self.arrival_of is not None:
            for own in removed:
                self.arrival_of.pop(own, None)  # absent of a copy that came without deduplication
        # Neighbours at once: a prompt may have 100,000 responses. From the end, because those behind a gap move up.
        ordered = np.sort(positions)
        for run in reversed(np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)):
            del self.ids[run[0] : run[-1] + 1], self.floats[run[0] : run[-1] + 1]
        self.columns = {name: np.delete(values, positions, axis=0) for name, values in self.columns.items()}
        return sum(map(len, removed)) // 4


Choice = list[tuple[PromptEntry, np.ndarray]]


@dataclass(eq=False, slots=True)
class BufferedGroup:
    """Responses that arrived together: those of arrival numbers `first` to `end` - 1 that are still stored."""

    entry: PromptEntry
    first: int
    end: int
    oldest_version: int
    """Oldest version among the responses whose lag counts."""
    uses: int = 0

    @property
    def positions(self) -> np.ndarray:
        """Positions of the stored responses, oldest first."""
        if not len(self.entry):
            return NOTHING
        return np.arange(*self.entry.columns["arrival"].searchsorted((self.first, self.end)))


class GroupQueue:
    """Groups in the order of their arrival, each drawn `max_uses` times.

    A drawn group counts as used whole, also where it holds more than K responses: leftovers would make batches of what was
    passed over. A group that may be drawn again goes to the end.
    """

    def __init__(self, max_uses: int, *, max_waiting: int | None = None) -> None:
        """Where more than `max_waiting` groups wait, the oldest leave; None = any number may wait."""
        self._max_uses = max_uses
        self._max_waiting = max_waiting
        self.groups: deque[BufferedGroup] = deque()
        """Groups that wait, those included whose responses have all left."""

    def append(self, group: BufferedGroup) -> list[BufferedGroup]:
        """Add a group at the end; returns the groups that had to leave."""
        self.groups.append(group)
        most = len(self.groups) if self._max_waiting is None else self._max_waiting
        return [self.groups.popleft() for _ in range(len(self.groups) - most)]

    def holds(self, num_groups: int, *, reference_version: int) -> bool:
        return sum(1 for _ in islice(self._ready(reference_version), num_groups)) == num_groups

    def choose(
        self, num_prompts: int, count: int, rng: np.random.Generator, *, reference_version: int
    ) -> tuple[Choice, list[BufferedGroup]]:
        """The oldest groups, with at most `count` responses of each; and those whose last use this was. A second group of a
        prompt is passed over, and keeps its place, while there are other prompts to fill the batch with."""
        firsts: dict[int, BufferedGroup] = {}
        passed_over: list[BufferedGroup] = []
        for group in self._ready(reference_version):
            if firsts.setdefault(group.entry.index, group) is not group:
                passed_over.append(group)
            if len(firsts) == num_prompts:
                break
        chosen: Choice = []
        used_up: list[BufferedGroup] = []
        for group in [*firsts.values(), *passed_over][:num_prompts]:
            # A random choice, not the first K: what is trained must not depend on a response's place in its group.
            chosen.append((group.entry, rng.permutation(group.positions)[:count]))
            self.groups.remove(group)
            group.uses += 1
            if group.uses < self._max_uses:
                self.groups.append(group)
            else:
                used_up.append(group)
        return chosen, used_up

    def _ready(self, reference_version: int) -> Iterator[BufferedGroup]:
        """Groups that can be drawn, oldest first; those at the front whose responses have all left are forgotten."""
        while self.groups and not len(self.groups[0].positions):
            self.groups.popleft()
        for group in self.groups:
            if len(group.positions) and group.entry.reference_version == reference_version:
                yield group


def mixed_choice(
    entries: Mapping[int, PromptEntry],
    num_prompts: int,
    count: int,
    rng: np.random.Generator,
    *,
    draws: PromptDraws,
    on_policy_probability: float,
) -> Choice:
    """The paper's rule: a prompt's responses are fresh with probability m, else drawn from all that is stored, by
    weight where responses have a `logit` and uniformly where they have none.

    In a batch of one prompt (the paper's red-teaming) fresh and old responses stand side by side instead: a share m is
    fresh, half of the others is drawn uniformly, the rest by weight.

    Prompts are not repeated inside a batch unless there are fewer prompts than places; places of a repeated prompt that are
    drawn alike share one draw, in which no response comes twice while there are enough.
    """
    prompts: list[tuple[int, bool]] = []
    """(prompt, whether it was drawn as a fresh one) for each place in the batch."""
    used: set[int] = set()
    for uniform in rng.random(num_prompts).tolist():
        prompt = None
        while prompt is None:
            fresh = uniform < on_policy_probability
            prompt = draws.fresh.draw(rng, exclude=used) if fresh else None
            if prompt is None:
                # Where the fresh prompts are all in the batch already, any other takes the place: a batch stays full.
                fresh, prompt = False, draws.all.draw(rng, exclude=used)
            if prompt is None:
                # Every prompt is in the batch equally often: from here on each may come once more.
                used.clear()
        used.add(prompt)
        prompts.append((prompt, fresh))
    since = draws.fresh_since
    if num_prompts == 1 and on_policy_probability < 1:
        # Fresh responses as far as there are enough, then uniform ones, then others; none twice.
        entry = entries[prompts[0][0]]
        own = draw_uniformly(entry, _rounded(on_policy_probability * count, rng), rng, since=since)
        num_uniform = _rounded(UNIFORM_SHARE * (count - len(own)), rng)
        own = np.concatenate([own, draw_uniformly(entry, num_uniform, rng, exclude=own)])
        return [(entry, np.concatenate([own, draw_by_weight(entry, count - len(own), rng, exclude=own)]))]
    chosen = [NOTHING] * num_prompts
    places: dict[tuple[int, bool], list[int]] = {}
    for place, drawn in enumerate(prompts):
        places.setdefault(drawn, []).append(place)
    # First the prompts that come once, fresh ones before old ones, then the others.
    for (prompt, fresh), same in sorted(places.items(), key=lambda item: 2 if len(item[1]) > 1 else not item[0][1]):
        # One draw for all its places: none comes twice if there are so many, else none twice in a place.
        draw = partial(_draw, entries[prompt], fresh, rng, since=since)
        positions = draw(len(same) * count)
        if len(positions) == len(same) * count:
            of_places = list(positions.reshape(len(same), count))
        else:
            of_places = [positions] if len(same) == 1 else [draw(count) for _ in same]
        for place, own in zip(same, of_places):
            chosen[place] = own
    return [(entries[prompt], positions) for (prompt, _), positions in zip(prompts, chosen)]


def _draw(entry: PromptEntry, fresh: bool, rng: np.random.Generator, count: int, *, since: int) -> np.ndarray:
    if not fresh:
        return draw_by_weight(entry, count, rng)
    drawn = draw_uniformly(entry, count, rng, since=since)
    # A fresh prompt may have lost its fresh responses again, by expiry.
    return drawn if len(drawn) else draw_uniformly(entry, count, rng)


def draw_uniformly(
    entry: PromptEntry, count: int, rng: np.random.Generator, *, since: int = 0, exclude: np.ndarray = NOTHING
) -> np.ndarray:
    """Positions of `count` responses with arrival number `since` or larger, uniformly; all of them where there are fewer."""
    positions = _live_without(entry, exclude, since)
    return rng.choice(positions, min(count, len(positions)), replace=False)


def draw_by_weight(
    entry: PromptEntry, count: int, rng: np.random.Generator, *, exclude: np.ndarray = NOTHING
) -> np.ndarray:
    """Positions of at most `count` responses, each with probability ~ exp(logit); uniformly without logits."""
    if "logit" not in entry.columns:
        return draw_uniformly(entry, count, rng, exclude=exclude)
    positions = _live_without(entry, exclude)
    count = min(count, len(positions))
    if count <= 0:
        return NOTHING
    # Gumbel top-k: the k largest of logit + noise follow that law, and nothing is exponentiated that could overflow.
    noise = rng.standard_exponential(len(positions))
    np.negative(np.log(noise, out=noise), out=noise)
    keys = entry.columns["logit"][positions] + noise
    best = np.flatnonzero(keys >= np.partition(keys, -count)[-count])
    # Scores may be too large for the noise to change them; among such equals the noise decides.
    return positions[best[np.lexsort((noise[best], keys[best]))[::-1][:count]]]


def _live_without(entry: PromptEntry, exclude: np.ndarray, since: int = 0) -> np.ndarray:
    """Positions of the stored responses, oldest first, that are not in `exclude`."""
    positions = np.arange(entry.columns["arrival"].searchsorted(since), len(entry))
    # `exclude` must be among `positions`: searchsorted would give a neighbour of any other.
    return np.delete(positions, positions.searchsorted(exclude)) if len(exclude) else positions


def _rounded(number: float, rng: np.random.Generator) -> int:
    """A neighbouring whole number, drawn so that it is right on average."""
    return int(number + rng.random()) if number % 1 else int(number)


class PromptDraws:
    """The prompts under one reference version: a draw without replacement of all, and one of the fresh ones.

    Fresh are the groups that arrived since `window_start`, topped up with the newest groups to at least P prompts, or to
    all there are. That is a suffix of all groups by arrival, so one number describes it: every response whose arrival number
    is `fresh_since` or larger.
    """

    def __init__(self) -> None:
        self.all = DrawWithoutReplacement()
        self.fresh = DrawWithoutReplacement()
        self.fresh_since = 0

    def note_arrival(self, prompt: int) -> None:
        """A group of this prompt has arrived: it is fresh, and can be drawn as a fresh one again at once."""
        # Not so in the draw of all: there a prompt that is drawn often would otherwise come more often than the others.
        if prompt not in self.all:
            self.all.put(prompt)
        self.fresh.put(prompt)

    def remove(self, prompt: int) -> None:
        self.all.remove(prompt)
        if prompt in self.fresh:
            self.fresh.remove(prompt)

    def refresh(
        self, entries: Mapping[int, PromptEntry], newest_first: Iterable[int], *, window_start: int, at_least: int
    ) -> None:
        """Bring up to date which prompts are fresh; `newest_first` are the prompts of all groups."""
        fresh: dict[int, int] = {}
        for prompt in newest_first:
            if prompt in fresh or prompt not in self.all:
                continue
            arrival = entries[prompt].newest_group_arrival
            if arrival < window_start and len(fresh) >= at_least:
                break
            fresh[prompt] = arrival
            if len(fresh) == len(self.all):
                break
        # The order is fixed, because removals move other prompts: a run that resumes draws as if it had not stopped.
        for prompt in sorted(set(self.fresh) - set(fresh), key=lambda prompt: entries[prompt].newest_group_arrival):
            self.fresh.remove(prompt)
        for prompt in fresh:
            if prompt not in self.fresh:
                self.fresh.put(prompt)
        self.fresh_since = min(window_start, *fresh.values())


class DrawWithoutReplacement:
    """Prompts drawn uniformly without replacement; when all have been drawn, all can be drawn again. All is O(1)."""

    def __init__(self) -> None:
        self._prompts: list[int] = []
        """Prompts; the first `_num_undrawn` can still be drawn in this round, the others have been."""
        self._index: dict[int, int] = {}
        self._num_undrawn = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[int]:
        return iter(self._prompts)

    def __contains__(self, prompt: object) -> bool:
        return prompt in self._index

    def put(self, prompt: int) -> None:
        """Add a prompt, or return it if it was drawn: from now on it can be drawn again."""
        if prompt not in self._index:
            self._index[prompt] = len(self._prompts)
            self._prompts.append(prompt)
        if self._index[prompt] >= self._num_undrawn:
            self._swap(self._index[prompt], self._num_undrawn)
            self._num_undrawn += 1

    def remove(self, prompt: int) -> None:
        # First out of the undrawn part, then to the end: swapping an undrawn prompt with the last one directly would put a
        # drawn prompt among the undrawn.
        if self._index[prompt] < self._num_undrawn:
            self._num_undrawn -= 1
            self._swap(self._index[prompt], self._num_undrawn)
        self._swap(self._index[prompt], len(self._prompts) - 1)
        self._prompts.pop()
        del self._index[prompt]

    def draw(self, rng: np.random.Generator, *, exclude: set[int]) -> int | None:
        """A prompt outside `exclude`, uniformly among the undrawn; None when every prompt is excluded."""
        if len(exclude) >= len(self) and sum(prompt in self._index for prompt in exclude) == len(self):
            return None
        skipped = []
        while (prompt := self._take(rng)) in exclude:
            skipped.append(prompt)
        for met in skipped:  # they were met, not drawn: they keep their turn
            self.put(met)
        return prompt

    def _take(self, rng: np.random.Generator) -> int:
        if not self._num_undrawn:
            self._num_undrawn = len(self._prompts)
        self._num_undrawn -= 1
        self._swap(int(rng.random() * (self._num_undrawn + 1)), self._num_undrawn)
        return self._prompts[self._num_undrawn]

    def _swap(self, a: int, b: int) -> None:
        prompts = self._prompts
        prompts[a], prompts[b] = prompts[b], prompts[a]
        self._index[prompts[a]], self._index[prompts[b]] = a, b
