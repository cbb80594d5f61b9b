"""Small learned functions beside the policy: the critic of PPO, the log Z of learned trajectory balance.

They live with the trainer, in fp32, and never travel to searchers.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


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
    """log Z of a prompt: a linear head on the mean of its last hidden states.

    Deviation: the hidden states are detached, so that learning log Z does not move the policy.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.started: Tensor
        self.register_buffer("started", torch.tensor(False))

    def start_at(self, log_z: float) -> None:
        """Begin near the truth: at beta .005 log Z is in the hundreds, and gradients of that size would drown the rest."""
        if not self.started:
            self.head.bias.data.fill_(log_z)
            self.started.fill_(True)

    def forward(self, hidden_TH: Tensor, prompt_spans: tuple[tuple[int, int], ...]) -> Tensor:
        means_PH = torch.stack([hidden_TH[start : start + length].mean(dim=0) for start, length in prompt_spans])
        return self.head(means_PH.detach().float())[:, 0]


def make_critic(model: PreTrainedModel, *, separate: bool) -> Critic:
    """On the model's trunk, or on a copy of it."""
    parameter = next(model.parameters())
    trunk = copy.deepcopy(model.base_model) if separate else None
    return Critic(_hidden_size(model), trunk=trunk).to(parameter.device)


def make_log_z(model: PreTrainedModel) -> LogZ:
    return LogZ(_hidden_size(model)).to(next(model.parameters()).device)


def _hidden_size(model: PreTrainedModel) -> int:
    return int(model.get_output_embeddings().weight.shape[1])
