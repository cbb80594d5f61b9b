"""Micro-batches as packed rows of tokens: what a model reads, and where each response token's prediction stands.

The last token of a response predicts nothing, so it is not read. With shared prompts, the responses of one prompt are
branches of one pass over the prompt, and equal responses are computed once. Both are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tba.models.packed_attention import PackedLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedTokens:
    """Sequences laid end to end.

    A prompt [5, 6] with responses [7, 8] and [9], prompts shared: input_ids_T = [5, 6, 7], positions_T = [0, 1, 2],
    predict_M = [1, 2, 1] (token 7 and token 9 are both predicted at the prompt's last token), targets_M = [7, 8, 9].
    """

    input_ids_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    predict_M: Tensor
    """Index in T of the hidden state that predicts each response token."""
    targets_M: Tensor
    """The response tokens, distinct responses in the order they first occur."""
    prompt_spans: tuple[tuple[int, int], ...]
    """(first index in T, length) of each prompt, once."""
    copies: Tensor | None = None
    """Index into M for each token of all responses in the order given, equal ones included; None = they are distinct."""

    def expand(self, values_M: Tensor) -> Tensor:
        """From distinct responses to all responses as given."""
        return values_M if self.copies is None else values_M[self.copies]


def pack(
    prompts: Sequence[Tensor], responses: Sequence[Sequence[Tensor]], *, share_prompts: bool, device: torch.device
) -> PackedTokens:
    """Pack prompts, each with its responses (at least one token each), into one row."""
    if not share_prompts:
        return _pack_whole(prompts, responses, device)
    distinct, copies = _distinct(responses)
    packed = _pack_shared(prompts, distinct, device)
    return packed if copies is None else replace(packed, copies=copies.to(device, non_blocking=True))


def _distinct(responses: Sequence[Sequence[Tensor]]) -> tuple[list[list[Tensor]], Tensor | None]:
    """Each prompt's distinct responses, and where each given response's tokens lie among theirs."""
    distinct: list[list[Tensor]] = []
    places, start = [], 0
    for own in responses:
        first: dict[bytes, int] = {}
        kept: list[Tensor] = []
        for response in own:
            key = response.cpu().numpy().tobytes()
            if key not in first:
                first[key] = start
                start += len(response)
                kept.append(response)
            places.append(torch.arange(first[key], first[key] + len(response)))
        distinct.append(kept)
    all_distinct = sum(map(len, distinct)) == len(places)
    return distinct, None if all_distinct else torch.cat(places)


def _pack_whole(prompts: Sequence[Tensor], responses: Sequence[Sequence[Tensor]], device: torch.device) -> PackedTokens:
    """Every response is a root: its prompt, then its tokens but the last."""
    pieces, predict, lengths, spans, start = [], [], [], [], 0
    for prompt, own in zip(prompts, responses):
        spans.append((start, len(prompt)))
        for response in own:
            length = len(prompt) + len(response) - 1
            pieces += [prompt, response[:-1]]
            predict.append(torch.arange(start + len(prompt) - 1, start + length))
            lengths.append(length)
            start += length
    return PackedTokens(
        input_ids_T=torch.cat(pieces).to(device, non_blocking=True),
        positions_T=torch.cat([torch.arange(length) for length in lengths]).to(device, non_blocking=True),
        layout=PackedLayout(root_lengths=lengths, device=device),
        predict_M=torch.cat(predict).to(device, non_blocking=True),
        targets_M=torch.cat([response for own in responses for response in own]).to(device, non_blocking=True),
        prompt_spans=tuple(spans),
    )


def _pack_shared(
    prompts: Sequence[Tensor], responses: Sequence[Sequence[Tensor]], device: torch.device
) -> PackedTokens:
    """Prompts are roots, responses of two tokens and more are branches; a single token needs only its prompt."""
    root_ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0)
    pieces, positions = list(prompts), [torch.arange(len(prompt)) for prompt in prompts]
    predict, branch_lengths, branch_roots, start = [], [], [], int(root_ends[-1])
    for root, (prompt, own) in enumerate(zip(prompts, responses)):
        for response in own:
            length = len(response) - 1
            predict.append(torch.cat([root_ends[root : root + 1] - 1, torch.arange(start, start + length)]))
            if length:
                pieces.append(response[:-1])
                positions.append(torch.arange(len(prompt), len(prompt) + length))
                branch_lengths.append(length)
                branch_roots.append(root)
                start += length
    layout = PackedLayout(
        root_lengths=[len(prompt) for prompt in prompts],
        branch_lengths=branch_lengths,
        branch_roots=branch_roots,
        device=device,
    )
    return PackedTokens(
        prompt_spans=tuple((int(end) - len(prompt), len(prompt)) for prompt, end in zip(prompts, root_ends)),
        input_ids_T=torch.cat(pieces).to(device, non_blocking=True),
        positions_T=torch.cat(positions).to(device, non_blocking=True),
        layout=layout,
        predict_M=torch.cat(predict).to(device, non_blocking=True),
        targets_M=torch.cat([response for own in responses for response in own]).to(device, non_blocking=True),
    )
