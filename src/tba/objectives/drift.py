"""How far a response may be pushed beyond the data it is: the bound that keeps trajectory balance stable off-policy.

TB's gradient pushes a response up or down by its residual and no importance weight appears. On fresh data that is safe: a
response that the policy gives up is hardly sampled again. On stale data it is not: a wrong response that was sampled once is
pushed down at every further visit although the policy would not produce it any more, up to r / beta nats, and what it shares
with right ones goes down with it. (On sort_digits of the bench exact TB ended at .43 at a lag of 3 steps where the
synchronous run had .69, and at .12 with each response trained four times: docs/log.md.)

So the push of a response is measured by its drift, log_pi now - log_pi when it was generated, and ends once the policy has
gone far enough in the push's own direction:

    response    no gradient once drift exceeds max_drift * sqrt(T) upwards for a push up, or downwards for a push down
    token       the same for each token alone, with max_drift itself (PPO's clip)
    taper       a push down is weighted by min(1, exp(drift)), a push up is left alone (TOPR, arXiv 2503.14286)
    exact       trajectory balance as it is

A response that is held back keeps its place in its prompt's log Z. The policy's own log-probs count, not the behaviour's:
exploration and top-p shift those. Where they are unknown (imports, responses of the reference) nothing is held back. The
square root is how far the log-prob of T tokens wanders when each token's wanders by itself: short and long responses are
held back alike, and the small gap between a bf16 engine and its trainer, which grows in the same way, closes no gate.

Axes: P prompts, K responses per prompt, N tokens of all responses.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tba.types import Batch

OffPolicyRule = Literal["response", "token", "taper", "exact"]


def gradient_share(
    batch: Batch, log_pi_N: Tensor, push_up_PK: Tensor, *, rule: OffPolicyRule, max_drift: float
) -> Tensor:
    """[N] in 0 to 1: how much of its gradient each token keeps. `log_pi_N` carries no gradient."""
    drift_N = torch.nan_to_num(log_pi_N - batch.policy_N, nan=0.0)
    if rule == "exact":
        return torch.ones_like(drift_N)
    push_up_N = batch.per_token(push_up_PK)
    if rule == "token":
        return (~_beyond(drift_N, push_up_N, max_drift)).to(drift_N.dtype)
    drift_PK = batch.sum_per_response(drift_N)
    if rule == "taper":
        return torch.where(push_up_N, 1.0, batch.per_token(drift_PK.clamp(max=0.0).exp()))
    tokens_PK = batch.sum_per_response(torch.ones_like(drift_N))
    return batch.per_token((~_beyond(drift_PK, push_up_PK, max_drift * tokens_PK.sqrt())).to(drift_N.dtype))


def _beyond(drift: Tensor, push_up: Tensor, limit: Tensor | float) -> Tensor:
    """Whether the policy has gone further than the limit in the direction of the push."""
    return torch.where(push_up, drift > limit, drift < -limit)
