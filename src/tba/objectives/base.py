"""What an objective is: a pure function of a batch and what the model said about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from tba.types import Batch, Forward, Loss

Coupling = Literal["token", "response", "group"]
"""What one response's gradient depends on: its token alone, its response, or log_pi of the other responses of its prompt.
Group-coupled losses take two passes when a prompt's responses are spread over micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an objective must be given."""

    reference: bool = False
    """log_ref per token."""
    behaviour: bool = False
    """Behaviour log-probs per token."""
    fresh: bool = False
    """Data of the current version only."""


class Objective(Protocol):
    """`value` of the returned Loss is back-propagated; it is divided by the totals of the whole step, so that the losses
    of a step's micro-batches add up."""

    @property
    def coupling(self) -> Coupling: ...

    @property
    def needs(self) -> Needs: ...

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss: ...
