"""Subtrajectory balance over turns (SubTB(lambda): arXiv 2209.12782; for language models arXiv 2310.04363): credit for
turns instead of a whole episode.

A response has turns 1 ... n: runs of chosen tokens with an environment's words between them. F(s_i) is the flow of the state
before turn i + 1, that is Z of the rest of the episode, sum over continuations of pi_ref exp(r / beta). Every stretch of
turns i + 1 ... j has to balance:

    rho_ij = log F(s_i) + sum over its chosen tokens of (log pi - log ref) - log F(s_j),     log F(s_n) = r / beta
    loss   = mean over responses of  sum_{i<j} lambda^(j - i) rho_ij^2 / sum_{i<j} lambda^(j - i)

With one turn this is trajectory balance with a learned log Z. log F is the critic's value V / beta at the first token of the
turn: V is the value in units of the reward, -beta KL included.

Deviation: as in trajectory_balance.py (beta / 2) x the loss is back-propagated. V has beta times its gradient, which is that
of (beta rho)^2 / 2: a regression in units of the reward. Where all residuals are 0 nothing changes.

Axes: P prompts, K responses per prompt, R = P K, N tokens of all responses, S states of the response with the most turns.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tba.objectives.objective import Coupling, Needs, Objective, mean_over_responses, mean_where
from tba.types import Batch, Forward, Loss


class SubTrajectoryBalance(Objective):
    """`subtb`: trajectory balance of every stretch of turns, with a learned flow before each turn (arXiv 2209.12782). For
    episodes of several turns; responses of one turn have `tb` with a learned log Z."""

    decay: float = Field(default=0.9, gt=0.0, le=1.0)
    """Weight lambda of a stretch for each turn that it is longer by: near 0 = single turns, 1 = all stretches alike."""
    has_critic: ClassVar[bool] = True
    default_coupling: ClassVar[Coupling] = "response"
    needs: ClassVar[Needs] = Needs(reference=True, positive_beta=True)
    default_beta: ClassVar[float] = 0.05

    def __call__(self, batch: Batch, forward: Forward, *, beta: float) -> Loss:
        assert forward.values_N is not None
        value_N = forward.values_N
        # V / beta, with the gradient of V.
        flow_N = value_N.detach() / beta + (value_N - value_N.detach())
        potential_RS, turns_R = potentials(batch, forward.log_pi_N, flow_N, beta=beta)
        weight_RSS = stretches(turns_R, potential_RS.shape[1], decay=self.decay)
        rho_RSS = potential_RS[:, :, None] - potential_RS[:, None, :]
        squares_R = (weight_RSS * rho_RSS.square()).sum(dim=(1, 2))
        # A response without weight has no stretch: 0 / 1.
        total_R = torch.where(turns_R > 0, weight_RSS.sum(dim=(1, 2)), 1.0)
        loss = mean_over_responses((squares_R / total_R).view(batch.shape), batch)
        return Loss(value=0.5 * beta * loss, metrics={"tb/loss": loss.detach(), **_metrics(potential_RS, turns_R)})


def potentials(batch: Batch, log_pi_N: Tensor, flow_N: Tensor, *, beta: float) -> tuple[Tensor, Tensor]:
    """log F(s_i) - sum of (log pi - log ref) before s_i -> [R, S], whose differences are the residuals rho_ij; and the
    number of turns [R], 0 where the response has no weight. `flow_N` is log F at each turn's first token."""
    kept_N, response_N = batch.kept_N, batch.response_of_token
    # A turn begins at a chosen token whose predecessor in the response was not chosen.
    follows_N = torch.zeros_like(kept_N)
    follows_N[1:] = kept_N[:-1] & (response_N[1:] == response_N[:-1])
    begins_N = kept_N & ~follows_N
    turns_R = torch.zeros(len(batch.lengths), dtype=torch.long, device=kept_N.device)
    turns_R = turns_R.index_add(0, response_N, begins_N.long())
    # Turns before this token, less those of earlier responses: 1 in the first turn, so that turn i ends in state i.
    turn_N = begins_N.long().cumsum(0) - (turns_R.cumsum(0) - turns_R)[response_N]
    shape = (len(turns_R), int(turns_R.max()) + 1)
    log_ratio_N = torch.where(kept_N, log_pi_N - batch.log_ref_N, torch.zeros_like(log_pi_N))
    ratio_RS = _table(log_ratio_N, response_N, turn_N, kept_N, shape)
    flow_RS = _table(flow_N.to(ratio_RS.dtype), response_N, turn_N - 1, begins_N, shape)
    end_RS = torch.arange(shape[1], device=turns_R.device) == turns_R[:, None]
    reward_R1 = batch.reward_PK.to(ratio_RS.dtype).view(-1, 1)
    flow_RS = torch.where(end_RS & (turns_R[:, None] > 0), reward_R1 / beta, flow_RS)
    return flow_RS - ratio_RS.cumsum(dim=1), turns_R


def stretches(turns_R: Tensor, states: int, *, decay: float) -> Tensor:
    """[R, S, S]: decay^(j - i) for the stretches i < j of each response, 0 elsewhere."""
    state_S = torch.arange(states, device=turns_R.device)
    length_SS = state_S[None, :] - state_S[:, None]
    weight_SS = torch.where(length_SS > 0, decay ** length_SS.clamp(min=0).float(), 0.0)
    return torch.where((state_S <= turns_R[:, None])[:, None, :], weight_SS, 0.0)


def _metrics(potential_RS: Tensor, turns_R: Tensor) -> dict[str, Tensor]:
    """Of whole episodes: those of trajectory balance, by the flow of the first state."""
    counts_R = turns_R > 0
    episode_R = potential_RS[:, 0] - potential_RS.gather(1, turns_R[:, None])[:, 0]
    return {
        "tb/log_z": mean_where(potential_RS[:, 0], counts_R),
        "tb/log_z_std": mean_where(episode_R.square(), counts_R).sqrt(),
        "tb/max_abs_residual": episode_R.detach().abs().max(),
        "objective/turns": mean_where(turns_R, counts_R),
    }


def _table(value_N: Tensor, row_N: Tensor, column_N: Tensor, kept_N: Tensor, shape: tuple[int, int]) -> Tensor:
    """Sums by row and column of the values that count, in fp32 (fp64 stays fp64)."""
    value_N = value_N if value_N.dtype == torch.float64 else value_N.float()
    place_N = torch.where(kept_N, row_N * shape[1] + column_N, 0)
    value_N = torch.where(kept_N, value_N, torch.zeros_like(value_N))
    return value_N.new_zeros(shape[0] * shape[1]).index_add(0, place_N, value_N).view(shape)
