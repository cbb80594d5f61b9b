"""Luck of the environment: one seed for the episodes of a group, and luck of its own in every episode.

The policy says a word, the environment tells whether it is lucky, as in half of the episodes, and the policy pulls arm A or
B. Rewards at beta = 1 / ln 2, so that a reward of 1 is a factor of 2 in the target:

             arm A   arm B    target: pi_ref 2^r with pi_ref = 1/2      log2 Z
    lucky      4       2      16 : 4, so A has 4/5                      log2 (16/2 + 4/2) = log2 10
    not        0       0       1 : 1, so A has 1/2                      log2 (1/2 + 1/2) = 0

There is one word, and what the environment tells is masked. A batch has every group of two episodes as often as it is
likely, so that its loss and its gradient are the expected ones. The gradient is by the logit x of arm A, for which
d log pi(A) / dx = 1 - pi(A) and d log pi(B) / dx = -pi(A).
"""

from itertools import product
from math import log, log2

import pytest
import torch
from test_by_hand import batch_of, exactly, flat

from tba.objectives.objective import Objective
from tba.objectives.subtrajectory_balance import SubTrajectoryBalance
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.types import Forward

BETA = 1 / log(2)
Episode = tuple[str, str]
"""Luck and arm: ("lucky", "A")."""
Groups = list[tuple[Episode, Episode]]
PAY = {("lucky", "A"): 4.0, ("lucky", "B"): 2.0, ("not", "A"): 0.0, ("not", "B"): 0.0}
TARGET = {"lucky": 4 / 5, "not": 1 / 2}
"""Probability of arm A."""
FRESH: list[Episode] = [("lucky", "A")] * 8 + [("lucky", "B")] * 2 + [("not", "A")] * 5 + [("not", "B")] * 5
"""Episodes of a policy that is at the target."""
STALE: list[Episode] = [("lucky", "A"), ("lucky", "B"), ("not", "A"), ("not", "B")]
"""Episodes of a policy that pulled both arms alike."""
TB = TrajectoryBalance(trust_region="none")


def own_luck(episodes: list[Episode]) -> Groups:
    return list(product(episodes, episodes))


def one_seed(episodes: list[Episode]) -> Groups:
    """The seed decides the luck, which two episodes of a group share."""
    return [(first, second) for first, second in own_luck(episodes) if first[0] == second[0]]


def answer(
    objective: Objective, groups: Groups, share: dict[str, float], flows: dict[str, float] | None = None
) -> tuple[float, dict[str, float]]:
    """The loss in squared units of ln 2, and the gradient by both logits, of a policy that pulls A with these shares.
    `flows`: log2 F of the states, "start" among them."""
    logit = {luck: torch.tensor(log(p / (1 - p)), dtype=torch.float64, requires_grad=True) for luck, p in share.items()}
    flows = flows or {"start": 0.0, "lucky": 0.0, "not": 0.0}
    episodes = [episode for group in groups for episode in group]
    zero = torch.zeros((), dtype=torch.float64)
    log_pi = [(zero, zero, torch.nn.functional.logsigmoid(logit[s] if a == "A" else -logit[s])) for s, a in episodes]
    log_half = -log(2)
    batch = batch_of(
        [[PAY[first], PAY[second]] for first, second in groups],
        behaviour=[[[0.0, 0.0, log_half]] * 2] * len(groups),
        mask=[[[1, 0, 1]] * 2] * len(groups),
    )
    forward = Forward(
        log_pi_N=torch.stack([token for tokens in log_pi for token in tokens]),
        # V = beta log F, which is log2 F at this beta.
        values_N=flat([[[flows["start"], 0.0, flows[luck]] for luck, _ in episodes]]),
    )
    loss = objective(batch, forward, beta=BETA)
    gradients = torch.autograd.grad(loss.value, list(logit.values()))
    return float(loss.metrics["tb/loss"]) / log(2) ** 2, {s: float(g) for s, g in zip(logit, gradients)}


@pytest.mark.parametrize("data", [FRESH, STALE], ids=["fresh", "stale"])
def test_with_one_seed_for_a_group_the_target_is_exact_on_data_of_any_origin(data):
    # Both episodes of a group tell the same log Z, log2 10 or 0: no residual, no gradient.
    loss, gradient = answer(TB, one_seed(data), TARGET)
    assert loss == exactly(0.0)
    assert gradient == {"lucky": exactly(0.0), "not": exactly(0.0)}


def test_luck_of_their_own_is_a_floor_of_the_loss_on_fresh_data():
    # Half of the groups have one lucky episode, which tell log2 10 and 0: residuals of half of that.
    # Loss (1/2) (log2 10 / 2)^2; by x the mean of d log pi is 0 under the policy's own pulls, so the noise has no direction.
    loss, gradient = answer(TB, own_luck(FRESH), TARGET)
    assert loss == exactly(log2(10) ** 2 / 8)
    assert gradient == {"lucky": exactly(0.0), "not": exactly(0.0)}


def test_luck_of_their_own_pulls_a_policy_at_the_target_away_on_stale_data():
    # A lucky episode has residual log2 10 / 2 in half of its groups, whatever its arm: what was pulled by luck is pushed up.
    # d log pi: (1/5 - 4/5) / 2 = -3/10 on average. Gradient -(1/2) x (log2 10 / 4) x -3/10, in units of the reward.
    # Without luck it is -(1/2) x (-log2 10 / 4) x (1/2 - 1/2) = 0.
    _, gradient = answer(TB, own_luck(STALE), TARGET)
    assert gradient == {"lucky": exactly(3 / 80 * log2(10)), "not": exactly(0.0)}


def test_luck_of_their_own_has_another_fixed_point_on_stale_data():
    # A at 2/3 in both cases. log2 Z as the episodes tell it, r - 1 - log2 pi: with 2/3 = 2 x 1/3 and c = -1 + log2 3
    #     lucky A  4 + c - 1 = c + 3    B  2 + c        not A  0 + c - 1 = c - 1    B  0 + c
    # The mean is c + 1: A has 2 and -2, B has 1 and -1. By x: 2 x 1/3 - 1 x 2/3 = 0, and the same with the other sign.
    # A residual is half the difference of two: mean square = variance / 2 = (4 + 1 + 4 + 1) / 4 / 2 = 5/4.
    share = {"lucky": 2 / 3, "not": 2 / 3}
    loss, gradient = answer(TB, own_luck(STALE), share)
    assert loss == exactly(5 / 4)
    assert gradient == {"lucky": exactly(0.0), "not": exactly(0.0)}
    # With one seed the same batch says which way the target is. Lucky groups of A and B, half of them, have residuals
    # (3 - 2) / 2 = 1/2 for A and -1/2 for B: -(1/2) x (1/2) (1/2 x 1/3 + 1/2 x 2/3) / 2 = -1/16 and so A rises.
    # Without luck A tells 1 less than B, so A falls to 1/2.
    _, gradient = answer(TB, one_seed(STALE), share)
    assert gradient == {"lucky": exactly(-1 / 16), "not": exactly(1 / 16)}


@pytest.mark.parametrize(("decay", "kept"), [(1.0, 1 / 3), (0.5, 1 / 5)])
def test_a_flow_for_each_turn_takes_most_of_the_luck_that_the_policy_is_told(decay, kept):
    # Flows log2 10 and 0 before the pull, and their mean at the start. The last turn balances; the whole episode is off by
    # -+ log2 10 / 2 and has decay^2 / (2 decay + decay^2) of the weight. By x in lucky episodes, half of all:
    # (1/2) x kept x (-log2 10 / 2) x (-3/10). tb has (K - 1) / K = 1/2 of that with kept = 1, see above.
    flows = {"start": log2(10) / 2, "lucky": log2(10), "not": 0.0}
    _, gradient = answer(SubTrajectoryBalance(decay=decay), own_luck(STALE), TARGET, flows)
    assert gradient == {"lucky": exactly(kept * 3 / 40 * log2(10)), "not": exactly(0.0)}
