"""Finished responses on their way from the slots to the caller."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from tba.generate.responses import Response
from tba.generate.transfer import OnItsWay
from tba.types import Completion


class Harvest:
    """Responses taken out of their slots, with their rows of the slots' tables."""

    def __init__(
        self,
        responses: Sequence[Response] = (),
        num_tokens: Sequence[int] | np.ndarray = (),
        tables: OnItsWay | None = None,
    ) -> None:
        """`tables`: tokens, behaviour and policy log-probs, a row per response."""
        self.responses, self.num_tokens, self.tables = responses, num_tokens, tables

    def completions(self, stop_ids: Collection[int]) -> Iterator[Completion]:
        """The finished records."""
        if self.tables is None:
            return
        arrays = self.tables.wait()
        for row, (response, count) in enumerate(zip(self.responses, self.num_tokens)):
            tokens, behaviour, policy = (array[row, :count] for array in arrays)
            yield response.completion(tokens.astype(np.int32), behaviour.copy(), policy.copy(), stop_ids)
