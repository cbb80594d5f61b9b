"""Ragged sequences as batches: packed rows of tokens, padded blocks, and the one rule that fills batches to a token budget.

A packed row is what a model in training reads: sequences end to end, with where each response token's prediction stands.
The last token of a response predicts nothing, so it is not read. The responses of one prompt are branches of one pass over
the prompt, and equal responses are computed once. Both are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tba.models.flash_attention import counted
from tba.models.packed_attention import PackedLayout
from tba.types import on_device

MIN_PADDED_TOKENS, MAX_PADDING = 512, 0.25
"""Number of tokens below which a padded batch is never split (small batches cost in calls what padding costs), and the share
of a larger one that may be padding."""

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTokens:
    """Sequences laid end to end.

    A prompt [5, 6] with responses [7, 8] and [9]: input_ids_T = [5, 6, 7], positions_T = [0, 1, 2],
    predict_M = [1, 2, 1] (token 7 and token 9 are both predicted at the prompt's last token), targets_M = [7, 8, 9].
    """

    input_ids_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    predict_M: Tensor  # index in T of the hidden state that predicts each response token
    targets_M: Tensor  # the response tokens, distinct responses in the order they first occur
    prompt_spans: tuple[tuple[int, int], ...]  # place of each prompt, once: (first index in T, length)
    prompts: tuple[Tensor, ...]  # the prompts as they were given
    responses: tuple[tuple[Tensor, ...], ...]
    """The distinct responses of each prompt; their tokens one after the other are `targets_M`."""
    copies: Tensor | None = None
    """Index into M for each token of all responses in the order given, equal ones included; None = they are distinct."""

    def rows(self) -> Iterator[tuple[Tensor, int]]:
        """Each distinct response as the model reads it alone: its prompt and its tokens but the last, and its length."""
        for prompt, own in zip(self.prompts, self.responses):
            for response in own:
                row = torch.cat([prompt, response[:-1]])
                yield on_device(row, self.input_ids_T.device), len(response)

    def expand(self, values_M: Tensor) -> Tensor:
        return values_M if self.copies is None else values_M[self.copies]


def pack(prompts: Sequence[Tensor], responses: Sequence[Sequence[Tensor]], *, device: torch.device) -> PackedTokens:
    """Pack prompts, each with its responses (at least one token each), into one row: prompts are roots, responses of two
    tokens and more are branches; a single token needs only its prompt."""
    # Layout of T: all prompts, then the branches of the first prompt, of the second, and so on.
    distinct, copies = _distinct(responses)
    roots = np.array([len(prompt) for prompt in prompts])
    root_ends = roots.cumsum()
    sizes = np.array([len(response) for own in distinct for response in own])
    lengths, root_of = sizes - 1, np.repeat(np.arange(len(prompts)), [len(own) for own in distinct])
    starts = root_ends[-1] + lengths.cumsum() - lengths
    within_M = counted(sizes)
    # A response's first token is predicted at its prompt's end, each other one at the token before it.
    predict_M = np.where(within_M == 0, np.repeat(root_ends[root_of], sizes), np.repeat(starts, sizes) + within_M) - 1
    positions_T = np.concatenate([counted(roots), np.repeat(roots[root_of], lengths) + counted(lengths)])
    is_branch = lengths > 0
    layout = PackedLayout(
        root_lengths=roots.tolist(),
        branch_lengths=lengths[is_branch].tolist(),
        branch_roots=root_of[is_branch].tolist(),
        device=device,
    )
    return PackedTokens(
        prompt_spans=tuple(zip((root_ends - roots).tolist(), roots.tolist())),
        input_ids_T=on_device(torch.cat([*prompts, *(response[:-1] for own in distinct for response in own)]), device),
        positions_T=on_device(torch.from_numpy(positions_T), device),
        layout=layout,
        predict_M=on_device(torch.from_numpy(predict_M), device),
        targets_M=on_device(torch.cat([response for own in distinct for response in own]), device),
        prompts=tuple(prompts),
        responses=tuple(map(tuple, distinct)),
        copies=None if copies is None else on_device(copies, device),
    )


def split_by_length(packed: PackedTokens, length: int) -> list[tuple[PackedTokens, Tensor]]:
    """The responses that the model reads in at most `length` tokens, and those that need more, packed apart; with each part
    the index into M of its tokens. A part without responses is left out, and what needs no split stays as it is."""
    device = packed.input_ids_T.device
    parts: list[tuple[list[Tensor], list[list[Tensor]], Tensor]] = []
    # Two packs of the same prompts, each with its own responses; `start` runs over M as in the whole.
    for is_long in (False, True):
        prompts, responses, indices, start = list[Tensor](), list[list[Tensor]](), list[Tensor](), 0
        for prompt, own in zip(packed.prompts, packed.responses):
            chosen = []
            for response in own:
                # The last token of a response is not read, so it does not count.
                if (len(prompt) + len(response) - 1 > length) == is_long:
                    chosen.append(response)
                    indices.append(torch.arange(start, start + len(response)))
                start += len(response)
            if chosen:
                prompts.append(prompt)
                responses.append(chosen)
        if prompts:
            parts.append((prompts, responses, torch.cat(indices).to(device)))
    if len(parts) == 1:
        return [(packed, parts[0][2])]
    return [(pack(prompts, responses, device=device), index) for prompts, responses, index in parts]


def _distinct(responses: Sequence[Sequence[Tensor]]) -> tuple[list[list[Tensor]], Tensor | None]:
    """Each prompt's distinct responses, and where each given response's tokens lie among theirs."""
    distinct: list[list[Tensor]] = []
    places, start = [], 0
    for own in responses:
        first: dict[bytes, int] = {}
        kept: list[Tensor] = []
        for response in own:
            # Equal only within a prompt: after another prompt the same tokens have other log-probs.
            key = response.cpu().numpy().tobytes()
            if key not in first:
                first[key] = start
                start += len(response)
                kept.append(response)
            places.append((first[key], len(response)))
        distinct.append(kept)
    if sum(map(len, distinct)) == len(places):
        return distinct, None
    return distinct, torch.cat([torch.arange(first, first + size) for first, size in places])


# --- batches under a token budget ------------------------------------------------------------------------------------


def split_by_budget(
    items: Iterable[Item],
    *,
    max_tokens: int,
    cost: Callable[[Sequence[Item], Item], int],
    joins: Callable[[Sequence[Item], Item], bool] = lambda batch, item: True,
) -> list[list[Item]]:
    """Items in their order, in batches of at most `max_tokens`; an item that costs more is a batch alone. `cost` is the
    number of tokens that an item adds to a batch; `joins` may refuse an item for another reason.

    split_by_budget([3, 4, 9, 2], max_tokens=8, cost=lambda batch, item: item) == [[3, 4], [9], [2]]
    """
    batches: list[list[Item]] = []
    tokens = 0
    for item in items:
        added = cost(batches[-1], item) if batches else 0
        if batches and tokens + added <= max_tokens and joins(batches[-1], item):
            batches[-1].append(item)
            tokens += added
        else:
            batches.append([item])
            tokens = cost([], item)  # in a new batch the item pays its prompt again
    return batches


def length_batches(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """Indices in batches of similar length: at most `token_budget` padded tokens (a longer one alone), and at most
    MAX_PADDING of them padding. length_batches([3, 9, 3], token_budget=512) == [[0, 2, 1]]"""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    rising = [max(1, lengths[index]) for index in order]
    ends = [0, *accumulate(rising)]

    # Ranks instead of indices: lengths rise with the rank, so the newest item of a batch is its longest, to which all are
    # padded, and the real tokens of a batch are a difference of sums.
    def padded_tokens(batch: Sequence[int], rank: int) -> int:
        return (len(batch) + 1) * rising[rank] - (len(batch) * rising[batch[-1]] if batch else 0)

    def pads_little(batch: Sequence[int], rank: int) -> bool:
        padded_size, real = (len(batch) + 1) * rising[rank], ends[rank + 1] - ends[batch[0]]
        return padded_size <= MIN_PADDED_TOKENS or padded_size - real <= MAX_PADDING * padded_size

    batches = split_by_budget(range(len(order)), max_tokens=token_budget, cost=padded_tokens, joins=pads_little)
    return [[order[rank] for rank in batch] for batch in batches]


def padded(rows: Sequence[np.ndarray], *, columns: int, device: torch.device) -> Tensor:
    """Rows of token ids, right-padded with 0 -> int64 [rows, columns]."""
    table = np.zeros((len(rows), columns), dtype=np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return on_device(torch.from_numpy(table), device)
