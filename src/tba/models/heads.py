"""Small learned functions beside the policy: the critic of PPO, the log Z of learned trajectory balance.

They live with the trainer, in fp32, and never travel to searchers.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

SMALLEST_SQUARE = 1e-12
"""Added to the mean square of a hidden state before it is divided by: only a state of zeros notices."""


class Critic(nn.Module):
    """Value of the state before each response token: a linear head on hidden states, 0 at the start.

    The hidden states are the policy's own, and the value loss then trains its trunk too, or those of `trunk`, a second
    model.
    """

    def __init__(self, hidden_size: int, *, trunk: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden_MH: Tensor) -> Tensor:
        return self.head(hidden_MH.float())[:, 0]


class LogZ(nn.Module):
    """log Z of a prompt: a start value plus a linear head on the mean of its last hidden states.

        log Z = start + bias + sum_i weight_i h_i / H,   h the mean hidden state scaled to a root mean square of 1

    sum_i |h_i| <= H whatever the width H, so an update that moves every parameter by at most a moves log Z by at most 2 a
    nats: a by the bias, which all prompts share, and a by the weights. Adam's first step has a = its learning rate, and so
    have later steps whose gradients agree; the most it can do is 3.2 times that (betas .9 and .999), after gradients of
    almost nothing.

    Deviation: the hidden states are detached, so that learning log Z does not move the policy.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, 1)
        self.start: Tensor
        self.register_buffer("start", torch.tensor(0.0))
        self.started = False
        self._zero()

    def start_at(self, log_z: float) -> None:
        """Give every prompt this log Z; what was learned before is forgotten.

        Begin near the truth: at beta .005 log Z is in the hundreds, and the head would take as many steps to get there.
        """
        self._zero()
        self.start.fill_(log_z)
        self.started = True

    def _zero(self) -> None:
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden_TH: Tensor, prompt_spans: tuple[tuple[int, int], ...]) -> Tensor:
        means_PH = torch.stack([hidden_TH[start : start + length].mean(dim=0) for start, length in prompt_spans])
        width = means_PH.shape[1]
        scaled_PH = nn.functional.rms_norm(means_PH.detach().float(), (width,), eps=SMALLEST_SQUARE)
        return self.start + self.head(scaled_PH / width)[:, 0]


def make_critic(model: PreTrainedModel, *, separate: bool) -> Critic:
    """On the model's trunk, or on a copy of it."""
    parameter = next(model.parameters())
    trunk = copy.deepcopy(model.base_model) if separate else None
    return Critic(_hidden_size(model), trunk=trunk).to(parameter.device)


def make_log_z(model: PreTrainedModel) -> LogZ:
    return LogZ(_hidden_size(model)).to(next(model.parameters()).device)


def _hidden_size(model: PreTrainedModel) -> int:
    return int(model.get_output_embeddings().weight.shape[1])
