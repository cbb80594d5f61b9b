"""`online_dpo`: direct preferences between the best and the worst of a prompt's responses (arXiv 2402.04792).

    loss = -mean_i log sigmoid(beta [(log pi_c - log pi_r) - (log ref_c - log ref_r)])

On stale data this is Async DPO (arXiv 2410.18252). A prompt whose rewards are all equal has no preference: its pair is one
and the same response, which gives no gradient.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tba.objectives.base import Coupling, Needs, Objective, mean_where
from tba.types import Batch, Forward, Loss


class OnlineDPO(Objective):
    default_coupling: ClassVar[Coupling] = "group"
    needs: ClassVar[Needs] = Needs(reference=True, positive_beta=True, group=True)
    default_beta: ClassVar[float] = 0.1

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        gap_PK = batch.sum_per_response(forward.log_pi_N) - batch.sum_per_response(batch.log_ref_N)
        kept_PK = batch.weight_PK > 0
        chosen_P1 = batch.reward_PK.masked_fill(~kept_PK, -torch.inf).argmax(dim=1, keepdim=True)
        rejected_P1 = batch.reward_PK.masked_fill(~kept_PK, torch.inf).argmin(dim=1, keepdim=True)
        margin_P = beta * (_pick(gap_PK, chosen_P1) - _pick(gap_PK, rejected_P1))
        prompts_P = kept_PK.any(dim=1)
        loss_P = torch.where(prompts_P, -logsigmoid(margin_P), torch.zeros_like(margin_P))
        pairs_P = prompts_P & (chosen_P1 != rejected_P1)[:, 0]
        metrics = {
            "objective/pairs": pairs_P.float().mean(),
            "objective/margin": mean_where(margin_P, pairs_P),
            "objective/accuracy": mean_where(margin_P > 0, pairs_P),
        }
        return Loss(value=loss_P.sum() / max(1, batch.totals.prompts), metrics=metrics)


def _pick(value_PK: Tensor, index_P1: Tensor) -> Tensor:
    return value_PK.gather(1, index_P1)[:, 0]
