"""Every setting of GRPO and Dr. GRPO against a slow second implementation: plain loops over tokens in Python numbers that
autograd follows, one response at a time, written from TRL 1.16's rules. Values and gradients agree on ragged, masked, stale
data; losses of whole prompts add up; what a setting must not touch is looked at by itself."""

from dataclasses import replace

import pytest
import torch
from resolved import resolved
from test_against_numpy import Data, K, P, random_data
from torch import Tensor

from tba.config import ConfigError, load_config
from tba.objectives.grpo import GRPO, DrGRPO, GroupRelative, highest
from tba.objectives.objective import centred
from tba.objectives.registry import make_objective
from tba.types import Batch, Forward

SETTINGS = [
    {},
    {"ratio": "sequence"},
    {"ratio": "sequence", "clip": 0.05, "clip_high": 0.1, "max_ratio": 1.15},
    {"max_ratio": 1.4},
    {"max_ratio": 1.1},  # below 1 + clip_high: it clips the push up earlier
    {"surrogate": "cispo", "clip_high": 1.3},
    {"surrogate": "cispo", "clip_high": 0.2},
    {"surrogate": "cispo", "clip_high": 1.1, "ratio": "sequence"},
    {"surrogate": "sapo"},
    {"surrogate": "sapo", "ratio": "sequence"},
    {"surrogate": "vespo"},
    {"off_policy_mask": 0.05},
    {"off_policy_mask": 0.05, "surrogate": "vespo"},
    {"off_policy_mask": 0.05, "ratio": "sequence"},
    {"top_entropy": 0.3},
    {"top_entropy": 0.0},
    {"top_entropy": 0.5, "surrogate": "cispo", "clip_high": 1.3, "off_policy_mask": 0.05},
]
KINDS = [
    (GRPO, {}),
    (GRPO, {"aggregate": "tokens"}),
    (GRPO, {"scale_rewards": False}),
    (DrGRPO, {"normal_length": 11}),
    (DrGRPO, {"normal_length": 1, "scale_rewards": True}),
]
EXP = torch.exp


def slow_loss(objective: GroupRelative, data: Data, log_pi_N: Tensor, entropy_N: Tensor, *, beta: float) -> Tensor:
    """The loss of a whole step, token by token."""
    batch, threshold = data.batch, slow_threshold(objective, data, entropy_N)
    counted = [r for r in range(P * K) if batch.weight_PK.flatten()[r] > 0]
    parts = []
    for r in counted:
        own = own_tokens(data, r)
        advantage = slow_advantage(objective, data, r)
        log_ratio = [log_pi_N[t] - batch.behaviour_N[t] for t in own]
        losses = []
        for t, token_log_ratio in zip(own, log_ratio, strict=True):
            loss = slow_surrogate(objective, advantage, token_log_ratio, log_ratio, log_pi_N[t])
            too_far = (
                objective.off_policy_mask is not None
                and -float(sum(log_ratio).detach()) / len(own) > objective.off_policy_mask
            )
            if (too_far and advantage < 0) or float(entropy_N[t]) < threshold:
                loss = loss * 0.0
            back = batch.log_ref_N[t] - log_pi_N[t]
            losses.append(loss + beta * (EXP(back) - back - 1.0))
        parts.append(losses)
    if isinstance(objective, DrGRPO):
        return sum(sum(losses) for losses in parts) / len(counted) / objective.normal_length
    if objective.aggregate == "tokens":
        return sum(sum(losses) for losses in parts) / sum(map(len, parts))
    return sum(sum(losses) / len(losses) for losses in parts) / len(counted)


def own_tokens(data: Data, r: int) -> list[int]:
    """The chosen tokens of a response."""
    start, end = int(data.batch.offsets[r]), int(data.batch.offsets[r + 1])
    return [t for t in range(start, end) if data.batch.loss_mask_N[t]]


def slow_advantage(objective: GroupRelative, data: Data, r: int) -> float:
    batch, p = data.batch, r // K
    rewards = [float(batch.reward_PK[p, k]) for k in range(K) if batch.weight_PK[p, k] > 0]
    mean = sum(rewards) / len(rewards)
    advantage = float(batch.reward_PK.flatten()[r]) - mean
    if not objective.scale_rewards:
        return advantage
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    return advantage / (variance**0.5 + 1e-4)


def slow_threshold(objective: GroupRelative, data: Data, entropy_N: Tensor) -> float:
    """PyTorch's own quantile over the tokens that count."""
    counted = [r for r in range(P * K) if data.batch.weight_PK.flatten()[r] > 0]
    entropies = [float(entropy_N[t]) for r in counted for t in own_tokens(data, r)]
    if objective.top_entropy == 1.0:
        return min(entropies)
    return float(torch.quantile(torch.tensor(entropies, dtype=torch.float64), 1.0 - objective.top_entropy))


def slow_surrogate(objective: GroupRelative, a: float, token_log_ratio, log_ratio: list, log_pi: Tensor) -> Tensor:
    w = EXP(token_log_ratio) if objective.ratio == "token" else EXP(sum(log_ratio) / len(log_ratio))
    if objective.surrogate == "cispo":
        return -min(float(w.detach()), objective.clip_high) * a * log_pi
    if objective.surrogate == "sapo":
        t = 1.0 if a > 0 else 1.05
        return -a * 4.0 / t / (1.0 + EXP(-t * (w - 1.0)))
    if objective.surrogate == "vespo":
        k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        whole = float(EXP(sum(log_ratio)).detach())
        return -(whole**k) * float(EXP(torch.tensor(decay - decay * whole, dtype=torch.float64))) * a * log_pi
    low, high = 1.0 - objective.clip, 1.0 + objective.clip_high
    bounded = w if objective.max_ratio is None or w <= objective.max_ratio else w * 0.0 + objective.max_ratio
    clipped = w if low <= w <= high else w * 0.0 + (low if w < low else high)
    return -bounded * a if -bounded * a >= -clipped * a else -clipped * a


def entropies(data: Data) -> Tensor:
    """With a tie here and there, and the largest ones at tokens that do not count."""
    generator = torch.Generator().manual_seed(100)
    drawn_N = torch.rand(len(data.log_pi_N), generator=generator, dtype=torch.float64)
    drawn_N = (drawn_N * 30).round() / 10
    return torch.where(data.batch.kept_N, drawn_N, 9.0)


@pytest.mark.parametrize(("kind", "own"), KINDS, ids=lambda value: str(getattr(value, "__name__", value)))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradient_agree_with_plain_loops(kind, own, settings):
    data, beta = random_data(1, old_values=False), 0.04
    objective, entropy_N = kind(**own, **settings), entropies(data)
    leaf, slow_leaf = (data.log_pi_N.clone().requires_grad_() for _ in range(2))
    loss = objective(data.batch, Forward(log_pi_N=leaf, entropy_N=entropy_N), beta=beta)
    loss.value.backward()
    want = slow_loss(objective, data, slow_leaf, entropy_N, beta=beta)
    want.backward()
    assert loss.value.item() == pytest.approx(want.item(), abs=1e-9)
    torch.testing.assert_close(leaf.grad, slow_leaf.grad, atol=1e-9, rtol=1e-6)
    assert leaf.grad.abs().max() > 1e-4, "a gradient of zeros proves nothing"
    assert all(torch.isfinite(number) for number in loss.metrics.values())


@pytest.mark.parametrize(
    "settings",
    [{"aggregate": "tokens"}, *(settings for settings in SETTINGS if "top_entropy" not in settings)],
    ids=str,
)
def test_losses_of_whole_prompts_add_up(settings):
    data, objective = random_data(0, old_values=False), GRPO(**settings)
    assert objective.coupling != "batch"
    whole = objective(data.batch, Forward(log_pi_N=data.log_pi_N), beta=0.1).value
    parts = []
    for prompts in ([0, 3], [4, 1, 2]):
        tokens = data.batch.tokens_of((torch.tensor(prompts)[:, None] * K + torch.arange(K)).flatten())
        parts.append(objective(data.batch.take(prompts), Forward(log_pi_N=data.log_pi_N[tokens]), beta=0.1).value)
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "coupling"),
    [
        ({}, "token"),
        ({"surrogate": "sapo", "aggregate": "tokens"}, "token"),
        ({"ratio": "sequence"}, "response"),
        ({"surrogate": "vespo"}, "response"),
        ({"off_policy_mask": 0.5}, "response"),
        ({"top_entropy": 0.2, "ratio": "sequence"}, "batch"),
    ],
    ids=str,
)
def test_what_a_gradient_depends_on_follows_from_the_settings(settings, coupling):
    assert GRPO(**settings).coupling == coupling


def test_what_is_left_out_still_feels_the_reference():
    """The gradient of the KL term alone is that of equal rewards."""
    data = random_data(1, old_values=False)
    away = replace(data.batch, behaviour_N=data.log_pi_N + 1.0)  # every token one nat less likely than it was
    down_N = away.per_token(centred(away.reward_PK, away.weight_PK) < 0.0)
    highest_N = torch.zeros_like(data.log_pi_N)
    highest_N[int(away.kept_N.long().argmax())] = 1.0

    def gradient(batch: Batch, **settings) -> Tensor:
        leaf = data.log_pi_N.clone().requires_grad_()
        # Not the clip, which ends the push of such tokens by itself.
        objective = GRPO(surrogate="sapo", **settings)
        objective(batch, Forward(log_pi_N=leaf, entropy_N=highest_N), beta=0.1).value.backward()
        return leaf.grad

    kl_alone = gradient(replace(away, reward_PK=torch.ones_like(away.reward_PK)))
    assert torch.equal(gradient(away, off_policy_mask=0.9)[down_N], kl_alone[down_N])
    differs_N = gradient(away, off_policy_mask=1.1) != kl_alone
    assert differs_N[down_N & away.loss_mask_N].all(), "within the threshold they are pushed"
    assert differs_N.sum() > 1
    assert (gradient(away, top_entropy=0.0) != kl_alone).nonzero().flatten().tolist() == [int(highest_N.argmax())]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.29, 0.5, 0.7, 0.9, 0.99])
def test_the_share_of_highest_values_is_a_quantile(share):
    # 101 values, all different: a share s keeps 1 + 100 s of them
    batch = replace(random_data(0, old_values=False).batch, loss_mask_N=torch.ones(101, dtype=torch.bool))
    batch = replace(
        batch, token_ids_N=torch.zeros(101, dtype=torch.long), weight_PK=torch.ones(1, 1), reward_PK=torch.ones(1, 1),
        offsets=torch.tensor([0, 101]), totals=replace(batch.totals, tokens=101),
    )  # fmt: skip
    values_N = torch.randperm(101, generator=torch.Generator().manual_seed(0)).double()
    top_N = highest(batch, values_N, share=share)
    assert sorted(values_N[top_N].tolist()) == list(range(100 - round(100 * share), 101))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["surrogate=cispo", "clip=0.1"],
            "objective.clip=0.1 has no effect with objective.surrogate=cispo: it bel",
        ),
        (
            ["surrogate=sapo", "clip_high=0.3"],
            "it belongs to clip and cispo. Leave objective.clip_high unset, or set objec",
        ),
        (["surrogate=cispo", "max_ratio=4"], "objective.max_ratio=4.0 has no effect with objective.surrogate=cispo"),
        (
            ["surrogate=vespo", "ratio=sequence"],
            "objective.ratio=sequence has no effect with objective.surrogate=vespo",
        ),
        (["surrogate=ppo"], "objective.surrogate: Input should be 'clip', 'cispo', 'sapo' or 'vespo', got 'ppo'."),
        (["top_entropy=1.5"], "objective.top_entropy: Input should be less than or equal to 1, got 1.5."),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_settings_of_another_surrogate_are_refused(name, settings, message):
    with pytest.raises(ConfigError) as error:
        make_objective(load_config(None, [f"objective.name={name}", *(f"objective.{one}" for one in settings)]))
    assert message in str(error.value)


def test_all_settings_of_another_surrogate_are_named_at_once():
    given = ["objective.name=grpo", "objective.surrogate=vespo", "objective.clip=0.1", "objective.max_ratio=3"]
    with pytest.raises(ConfigError, match=r"objective\.clip=0\.1 (.|\n)*objective\.max_ratio=3\.0"):
        make_objective(load_config(None, given))


@pytest.mark.parametrize("surrogate", ["clip", "cispo", "sapo", "vespo"])
def test_a_config_that_was_filled_in_with_defaults_is_valid(surrogate):
    filled = resolved(load_config(None, ["objective.name=grpo", f"objective.surrogate={surrogate}"]))
    assert filled.objective.settings["clip_high"] == 0.2
    assert make_objective(filled) == GRPO(surrogate=surrogate)


def test_dr_grpo_has_no_other_way_to_average():
    with pytest.raises(ConfigError, match=r"unknown key objective\.aggregate for objective\.name=dr_grpo"):
        make_objective(load_config(None, ["objective.name=dr_grpo", "objective.aggregate=tokens"]))
