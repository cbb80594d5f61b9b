"""Responses that a transformers model decodes together: prompts of several requests, left-padded to the longest, each read
once for all of its samples. Rows that have finished leave the batch when they are half of it.

Axes: R responses of the batch, B rows that are still in it, P prompts, T tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.generate.sampling import (
    Response,
    SampledTokens,
    SamplingNeeds,
    SamplingState,
    response_key,
    sampling_needs,
    sequence_of,
)
from tba.types import Completion

CACHES = ("past_key_values", "cache_params")
"""Names under which models give back, and take, what they keep of the tokens they have read: keys and values, or states."""


class ResponseBatch:
    """The state of a batch between two decode steps.

    `switch` is the length in tokens beyond which the model's rotary angles change (longrope): there the cached keys, which
    have the old ones, are thrown away, and everything is read again, as in transformers' `generate`. Rows of such a batch
    have equal lengths.
    """

    def __init__(
        self,
        responses: list[Response],
        *,
        seed: int,
        version: int,
        device: torch.device,
        switch: int | None = None,
        may_select: bool = True,
        may_cache: bool = True,
        takes_positions: bool = True,
    ) -> None:
        """`may_select` says whether rows of the model's cache may be repeated and left out (each response reads its prompt
        itself otherwise), `may_cache` whether it may be used at all (everything is read again for each token otherwise),
        `takes_positions` whether the model is told them."""
        self.responses, self.switch, self.device = responses, switch, device
        self._may_select, self._may_cache = may_select and may_cache, may_cache
        self._takes_positions = takes_positions
        self.open_rows = set(range(len(responses)))
        self.rows = list(range(len(responses)))
        """Number of the response of each row."""
        requests = {id(response.request): response.request for response in responses}
        places = {key: place for place, key in enumerate(requests)}
        self._prompts_R = torch.tensor([places[id(response.request)] for response in responses], device=device)
        self._ids_PT, self._mask = left_padded([sequence_of(request) for request in requests.values()], device)
        self.is_padded = not bool(self._mask.all())
        if not self._may_select:
            self._ids_PT, self._mask = self._ids_PT[self._prompts_R], self._mask[self._prompts_R]
            self._prompts_R = torch.arange(len(responses), device=device)
        self._lengths_R = self._mask.sum(dim=1)[self._prompts_R]
        self._cache: dict[str, Any] = {}
        """What the model keeps of the tokens it has read, by the name of the argument; empty = nothing."""
        self._columns: list[tuple[Tensor, Tensor, Tensor]] = []
        """Tokens, behaviour and policy log-probs [R] of each step; rows that have left keep what they had."""
        self._settings = _Settings(responses, seed, device)
        self.open_spans(version)

    def open_spans(self, version: int) -> None:
        """From here on this version chooses."""
        for row in self.open_rows:
            self.responses[row].open_span(self.responses[row].num_prefix_tokens + len(self._columns), version)

    def inputs(self) -> dict[str, Any]:
        """Arguments of the model's next pass."""
        if not self._cache:
            ids, positions = self._everything(), positions_of(self._mask)
        else:
            chosen_B = self._rows()
            ids = self._columns[-1][0][chosen_B][:, None]
            positions = (self._lengths_R[chosen_B] + len(self._columns) - 1)[:, None]
        padding = {"attention_mask": self._mask} if self.is_padded else {}
        places = {"position_ids": positions} if self._takes_positions else {}
        return {"input_ids": ids, **self._cache, **padding, **places}

    def _everything(self) -> Tensor:
        """Each prompt once, or at the switch prompt and response so far of each row."""
        if not self._columns:
            return self._ids_PT
        response = torch.stack([tokens for tokens, _, _ in self._columns], dim=1)[self._rows()]
        return torch.cat([self._ids_PT[self._prompts_R[self._rows()]], response], dim=1)

    def take_outputs(self, output: Any) -> Tensor:
        """Keep the cache, one row for each response; returns the logits [B, V] of the next tokens."""
        self._cache = kept_cache(output) if self._may_cache else {}
        logits = output.logits[:, -1].float()
        if self._columns or not self._may_select:
            return logits
        self._select(self._prompts_R)
        return logits[self._prompts_R]

    def state(self) -> SamplingState:
        return self._settings.state(self._rows(), len(self._columns))

    def needs(self) -> SamplingNeeds:
        return self._settings.needs(self.rows, len(self._columns))

    def append(self, sampled: SampledTokens) -> None:
        rows, columns = self._rows(), []
        for index, part in enumerate(sampled):
            fill = 0 if index == 0 else float("nan")
            columns.append(torch.full((len(self.responses),), fill, dtype=part.dtype, device=self.device))
            columns[-1][rows] = part
        self._columns.append((columns[0], columns[1], columns[2]))
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)
        if self.switch is not None and self._mask.shape[1] == self.switch + 1:
            self._cache = {}

    def take_finished(self, stop_ids: frozenset[int]) -> list[Completion]:
        """Responses that have ended with the last tokens; the batch shrinks when half of its rows have."""
        tokens, broken = self._columns[-1][0].tolist(), self._columns[-1][2].isnan().tolist()
        finished = [
            row
            for row in sorted(self.open_rows)
            if tokens[row] in stop_ids
            or broken[row]  # nothing can follow: `Response.completion` raises
            or self._num_tokens(row) >= self.responses[row].sampling.max_new_tokens
        ]
        self.open_rows.difference_update(finished)
        done = self._completions(finished, stop_ids) if finished else []
        if self._may_select and self.open_rows and 2 * len(self.open_rows) <= len(self.rows):
            kept = [place for place, row in enumerate(self.rows) if row in self.open_rows]
            self._select(torch.tensor(kept, device=self.device))
            self.rows = [self.rows[place] for place in kept]
        return done

    def _num_tokens(self, row: int) -> int:
        return self.responses[row].num_prefix_tokens + len(self._columns)

    def _select(self, places: Tensor) -> None:
        """Have these rows of mask and cache, in this order."""
        for cache in self._cache.values():
            cache.batch_select_indices(places)
        self._mask = self._mask[places]

    def _rows(self) -> Tensor:
        return torch.tensor(self.rows, device=self.device)

    def _completions(self, rows: list[int], stop_ids: frozenset[int]) -> list[Completion]:
        """The finished records of some responses, read from the device at once."""
        tokens, behaviour, policy = (torch.stack(part, dim=1)[rows].cpu().numpy() for part in zip(*self._columns))
        done = []
        for place, row in enumerate(rows):
            response = self.responses[row]
            unknown = np.full(response.num_prefix_tokens, np.nan, dtype=np.float32)
            done.append(
                response.completion(
                    np.concatenate((response.request.prefix_ids, tokens[place])).astype(np.int32),
                    np.concatenate((unknown, behaviour[place])),
                    np.concatenate((unknown, policy[place])),
                    stop_ids,
                )
            )
        return done


def kept_cache(output: Any) -> dict[str, Any]:
    """What a model keeps of the tokens it has read, by the name of the argument."""
    kept = ((name, getattr(output, name, None)) for name in CACHES)
    return {name: cache for name, cache in kept if cache is not None}


class _Settings:
    """Sampling settings of a batch's responses, as tensors [R]."""

    def __init__(self, responses: Sequence[Response], seed: int, device: torch.device) -> None:
        self._all_needs = [sampling_needs(response.sampling) for response in responses]
        self._lacking = [response.sampling.min_new_tokens - response.num_prefix_tokens for response in responses]
        """Tokens before which each response must not end."""

        def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        keys = [response_key(seed, response.request.prompt.id, response.sample_index) for response in responses]
        samplings = [response.sampling for response in responses]
        self._tensors = {
            "key": tensor(keys, torch.int64),
            "position": tensor([response.num_prefix_tokens for response in responses], torch.int64),
            "temperature": tensor([1.0 if s.greedy else s.temperature for s in samplings], torch.float32),
            "policy_temperature": tensor([s.training_temperature for s in samplings], torch.float32),
            "top_p": tensor([s.top_p for s in samplings], torch.float32),
            "top_k": tensor([s.top_k for s in samplings], torch.int64),
            "greedy": tensor([int(s.greedy) for s in samplings], torch.int64),
            "min_new_tokens": tensor([s.min_new_tokens for s in samplings], torch.int64),
        }

    def state(self, rows_B: Tensor, num_generated: int) -> SamplingState:
        chosen = {name: values[rows_B] for name, values in self._tensors.items()}
        return SamplingState(**{**chosen, "position": chosen["position"] + num_generated})

    def needs(self, rows: Sequence[int], num_generated: int) -> SamplingNeeds:
        found = SamplingNeeds(*(any(flags) for flags in zip(*(self._all_needs[row] for row in rows))))
        return found._replace(forbidden=any(num_generated < self._lacking[row] for row in rows))


def positions_of(mask: Tensor) -> Tensor:
    """Position of each token among the real ones of its row; 0 for padding."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def left_padded(sequences: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [P, T] and which of them are real; padding has id 0."""
    longest = max(map(len, sequences))
    ids, real = np.zeros((len(sequences), longest), np.int64), np.zeros((len(sequences), longest), bool)
    for row, sequence in enumerate(sequences):
        ids[row, longest - len(sequence) :], real[row, longest - len(sequence) :] = sequence, True
    return torch.from_numpy(ids).to(device), torch.from_numpy(real).to(device)
