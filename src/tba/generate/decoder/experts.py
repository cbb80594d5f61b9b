"""The MLP of a layer with experts: each token goes through the few that a router chooses, and their outputs are summed by
the router's weights.

Tokens are sorted by expert, so that each matrix product is one grouped product over all experts. No shape depends on what
is chosen and nothing is read back from the device, so that a captured CUDA graph serves every choice. (In fp32 PyTorch's
grouped product goes through the host: there is no graph then.)

Axes: N tokens, E hidden, X experts, C experts chosen by a token, R = N C rows, F MLP width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tba.generate.decoder.spec import Experts, ExpertsSpec


def choose_experts(logits_NX: Tensor, spec: ExpertsSpec) -> tuple[Tensor, Tensor]:
    """Weights [N, C] in fp32 and numbers [N, C] of each token's experts."""
    logits_NX = logits_NX.float()
    highest_NC, chosen_NC = torch.topk(logits_NX, spec.num_chosen, dim=-1)
    if spec.normalised:  # a soft-max of all, chosen and divided by its sum, is the soft-max of the chosen
        return torch.softmax(highest_NC, dim=-1), chosen_NC
    return torch.exp(highest_NC - torch.logsumexp(logits_NX, dim=-1, keepdim=True)), chosen_NC


def apply_experts(x_NE: Tensor, experts: Experts, spec: ExpertsSpec, gated: Callable[[Tensor], Tensor]) -> Tensor:
    """What the experts add to each token [N, E], fp32; `gated` turns gate over up [R, 2 F] into [R, F]."""
    weight_NC, chosen_NC = choose_experts(experts.router(x_NE), spec)
    expert_R, order_R = torch.sort(chosen_NC.flatten(), stable=True)
    counts_X = torch.zeros(spec.num_experts, dtype=torch.int32, device=x_NE.device)
    counts_X.scatter_add_(0, expert_R, torch.ones_like(expert_R, dtype=torch.int32))
    ends_X = counts_X.cumsum(0, dtype=torch.int32)
    rows = x_NE[order_R // spec.num_chosen]
    inner = gated(_grouped(rows, experts.up, experts.up_bias, expert_R, ends_X))
    output = _grouped(inner, experts.down, experts.down_bias, expert_R, ends_X)
    # Back in the order of the tokens first: a sum in the order of the experts would change from run to run on a GPU.
    output_NCE = torch.empty_like(output).index_copy_(0, order_R, output).unflatten(0, chosen_NC.shape)
    return torch.bmm(weight_NC[:, None].to(output.dtype), output_NCE).squeeze(1).float()


def clamped_gate(inner_R2F: Tensor, spec: ExpertsSpec) -> Tensor:
    """GPT-OSS's gated activation [R, F]."""
    assert spec.gate_limit is not None
    gate, up = inner_R2F.chunk(2, dim=-1)
    gate, up = gate.clamp(max=spec.gate_limit), up.clamp(-spec.gate_limit, spec.gate_limit)
    return (up + 1) * (gate * torch.sigmoid(gate * spec.gate_alpha))


def _grouped(rows_RI: Tensor, weight_XOI: Tensor, bias_XO: Tensor | None, expert_R: Tensor, ends_X: Tensor) -> Tensor:
    """Each row times its expert's matrix, plus its bias; rows are sorted by expert."""
    product = F.grouped_mm(rows_RI, weight_XOI.transpose(-1, -2), offs=ends_X)
    return product if bias_XO is None else product + bias_XO[expert_R]
