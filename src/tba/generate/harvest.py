"""Finished responses on their way from the slots to the caller."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tba.generate.responses import Response
from tba.types import Completion


class Harvest:
    """Responses taken out of their slots, and their rows of the slots' tables: under way, where those lie on a GPU."""

    def __init__(
        self,
        responses: Sequence[Response] = (),
        num_tokens: Sequence[int] | np.ndarray = (),
        tables: Sequence[Tensor] = (),
    ) -> None:
        """`tables`: tokens, behaviour and policy log-probs, a row per response."""
        self.responses, self.num_tokens, self.tables = responses, num_tokens, tables
        self.arrived: torch.cuda.Event | None = None
        if any(table.is_pinned() for table in tables):
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def completions(self, stop_ids: Collection[int]) -> Iterator[Completion]:
        """The finished records."""
        if self.arrived is not None:
            self.arrived.synchronize()
        arrays = [table.numpy() for table in self.tables]
        for row, (response, count) in enumerate(zip(self.responses, self.num_tokens)):
            tokens, behaviour, policy = (array[row, :count] for array in arrays)
            yield response.completion(tokens.astype(np.int32), behaviour.copy(), policy.copy(), stop_ids)
