"""Our losses and gradients against TRL's own trainers, on the same tiny Llama and the same batch.

    pip install -e .[benchmark] && python -m pytest tests/objectives/test_against_trl.py

Nothing of TRL is copied here. Its trainers are built as a user would build them; only sampling is replaced, by responses
that are given. For GRPO and RLOO TRL then scores these responses itself with the *old* weights (old and reference
log-probs, rewards, penalty, advantages: `_generate_and_score_completions`), the *current* weights are loaded, and its
`compute_loss` is called. For online DPO its `training_step` is called, which does all of it. On our side the same responses
are packed, read once with each of the three weights, and given to the objective. So padding against packing, temperature,
masks, advantages, ratios, clips, KL terms and normalisers are compared at once, in the loss and in the weights' gradients.

What is the same, and what differs between the two libraries:

`grpo` = loss_type="grpo", `dr_grpo` = loss_type="dr_grpo" with scale_rewards="none", both with
use_bias_correction_kl=False: the same in everything. By default TRL 1.16 trains with "dapo" and multiplies the KL
term by the ratio (DeepSeek-V3.2), which neither method's paper does.
The other loss types and settings of GRPOConfig are settings of ours (`AS_IN_TRL`), and the same in everything too.
`proximal_rloo` = TRL's RLOO with normalize_advantages=False (its default): clipped ratio of whole responses, penalty
beta (log pi_old - log ref) in the reward. Ours may sample from a truncated or tempered distribution, so it has two old
log-probs (behaviour in the ratio, policy in the penalty); TRL has one, so they are equal here.
`rloo` has no ratio, TRL has no trainer without one: losses differ, gradients on fresh data do not.
`online_dpo` is TRL's with loss_type="sigmoid". TRL draws two responses per prompt, so it is given the best and the worst of
our four. On a tie TRL prefers the first response; ours learns nothing. No tie is compared here.
Old log-probs of TRL are its trainer's own; ours are the generator's. Here both are those of the old weights.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import VOCABULARY, tiny_llama, tiny_tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tba.models.policy import PolicyModel
from tba.objectives.grpo import GRPO, DrGRPO
from tba.objectives.objective import Objective
from tba.objectives.policy_gradient import RLOO, OnlineDPO, ProximalRLOO
from tba.trainer.batch import pack_responses
from tba.types import Batch, Forward, Loss, Totals

pytest.importorskip(
    "trl", reason="needs TRL, which the optional extra `benchmark` installs: pip install -e .[benchmark]"
)

LENGTHS = [[3, 7, 1, 5], [2, 2, 8, 6], [4, 1, 3, 5]]
PROMPT_LENGTHS = [4, 2, 6]
REWARDS = [[1.0, 0.0, 0.25, -0.5], [0.0, 2.0, 0.5, 1.0], [-1.0, 0.1, 0.7, 0.2]]
P, K, MAX_NEW_TOKENS = 3, 4, 10


@pytest.fixture(autouse=True)
def _without_the_warning_of_rollout_func(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Three versions of one model, far enough apart that ratios leave the clip range."""

    reference: LlamaForCausalLM
    old: LlamaForCausalLM
    current: LlamaForCausalLM


def three_weights(*, noise: float) -> Weights:
    reference = tiny_llama()
    generator = torch.Generator().manual_seed(1)
    old = _moved(reference, noise, generator)
    return Weights(reference=reference, old=old, current=_moved(old, noise, generator))


def _moved(model: LlamaForCausalLM, noise: float, generator: torch.Generator) -> LlamaForCausalLM:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return model


# ------------------------------------------------------------------------------------------------ our side
def ours(weights: Weights, *, temperature: float, mask_N: Tensor | None = None) -> Batch:
    """Three prompts x four ragged responses, read with the old and the reference weights."""
    generator = torch.Generator().manual_seed(2)

    def words(count: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (count,), generator=generator)

    lengths = torch.tensor(LENGTHS).flatten()
    N = int(lengths.sum())
    unread, reward_PK = torch.zeros(N), torch.tensor(REWARDS)
    batch = Batch(
        prompt_ids=tuple(f"p{p}" for p in range(P)),
        prompt_tokens=tuple(words(length) for length in PROMPT_LENGTHS),
        token_ids_N=words(N),
        offsets=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        loss_mask_N=torch.ones(N, dtype=torch.bool) if mask_N is None else mask_N,
        log_ref_N=unread,
        behaviour_N=unread,
        policy_N=unread,
        rewards={"score": reward_PK},
        reward_PK=reward_PK,
        weight_PK=torch.ones(P, K),
        version_PK=torch.zeros(P, K, dtype=torch.long),
        truncated_PK=torch.zeros(P, K, dtype=torch.bool),
        rows_PK=torch.arange(P * K).view(P, K),
        totals=Totals(prompts=P, responses=P * K, tokens=N if mask_N is None else int(mask_N.sum())),
    )
    with torch.no_grad():
        old_N = read(weights.old, batch, temperature=temperature).log_pi_N
        log_ref_N = read(weights.reference, batch, temperature=temperature).log_pi_N
    old_N = torch.where(batch.loss_mask_N, old_N, torch.nan)
    return replace(batch, log_ref_N=log_ref_N, behaviour_N=old_N, policy_N=old_N)


def read(model: LlamaForCausalLM, batch: Batch, *, temperature: float) -> Forward:
    """With gradients in a copy's weights unless they are switched off: packed attention stays in the model it was put in."""
    return _forward(PolicyModel(copy.deepcopy(model)), batch, temperature)


def our_loss(
    objective: Objective, weights: Weights, batch: Batch, *, beta: float, temperature: float
) -> tuple[Loss, Tensor]:
    """The loss of the current weights, and its gradient."""
    policy = PolicyModel(copy.deepcopy(weights.current))
    assert policy.packed
    loss = objective(batch, _forward(policy, batch, temperature), beta=beta)
    loss.value.backward()
    return loss, gradient_of(policy.model)


def _forward(policy: PolicyModel, batch: Batch, temperature: float) -> Forward:
    everything = list(range(len(batch.lengths)))
    packed = pack_responses(batch, everything, device=torch.device("cpu")).packed
    return policy.forward(packed, temperature=temperature)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])


# ------------------------------------------------------------------------------------------------ TRL's side
def responses_of(batch: Batch) -> list[list[int]]:
    return [ids.tolist() for ids in batch.token_ids_N.split(batch.lengths.tolist())]


def prompts_of(batch: Batch) -> list[list[int]]:
    """One per response."""
    return [prompt.tolist() for prompt in batch.prompt_tokens for _ in range(K)]


def saved(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    """The model as loaded from disk: TRL loads its reference model from where the policy came from."""
    model.save_pretrained(folder / "reference")
    return LlamaForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32)


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": P * K,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        **more,
    }


def dataset():
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["w3 w4"] * (P * K)})


def given_rewards(completions: list[str], **_: Any) -> list[float]:
    return [reward for own in REWARDS for reward in own]


def trl_grpo(weights: Weights, batch: Batch, folder: Path, **config: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient of TRL's GRPOTrainer; the responses come in by its `rollout_func`."""
    from trl import GRPOConfig, GRPOTrainer

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        masks = [[int(m) for m in mask] for mask in batch.loss_mask_N.split(batch.lengths.tolist())]
        # Read by off_policy_mask_threshold alone: ratios are to what TRL itself computes with the old weights.
        log_probs = [part.tolist() for part in batch.behaviour_N.nan_to_num().split(batch.lengths.tolist())]
        answers = {"completion_ids": responses_of(batch), "logprobs": log_probs, "env_mask": masks}
        return {"prompt_ids": prompts_of(batch), **answers}

    # num_iterations = 2: with one, TRL takes the ratio for 1 and does not keep old log-probs.
    common = {"num_generations": K, "max_completion_length": MAX_NEW_TOKENS, "num_iterations": 2}
    common |= {"use_bias_correction_kl": False}
    trainer = GRPOTrainer(
        model=saved(weights.reference, folder),
        reward_funcs=given_rewards,
        args=GRPOConfig(**settings(folder, **common, **config)),
        train_dataset=dataset(),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout,
    )
    return _loss_of_stale_data(trainer, weights)


def trl_rloo(weights: Weights, batch: Batch, folder: Path, **config: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient of TRL's RLOOTrainer; its sampling is replaced."""
    from trl import RLOOConfig, RLOOTrainer

    common = {"num_generations": K, "max_completion_length": MAX_NEW_TOKENS, "normalize_advantages": False}
    trainer = RLOOTrainer(
        model=saved(weights.reference, folder),
        reward_funcs=given_rewards,
        args=RLOOConfig(**settings(folder, **common, **config)),
        train_dataset=dataset(),
        processing_class=tiny_tokenizer(),
    )
    trainer._generate = lambda prompts: (prompts_of(batch), responses_of(batch), [""] * len(prompts))
    return _loss_of_stale_data(trainer, weights)


def _loss_of_stale_data(trainer: Any, weights: Weights) -> tuple[Tensor, Tensor]:
    """TRL scores the responses with the old weights, and computes the loss with the current ones."""
    trainer.current_gradient_accumulation_steps = 1  # as train() sets it
    trainer.model.load_state_dict(weights.old.state_dict())
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": "w3 w4"}] * (P * K))
    trainer.model.load_state_dict(weights.current.state_dict())
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), gradient_of(trainer.model)


def trl_online_dpo(weights: Weights, batch: Batch, folder: Path, *, beta: float) -> tuple[Tensor, Tensor]:
    """Loss and gradient of TRL's OnlineDPOTrainer, given each prompt's best and worst response, in either order."""
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    best, worst = batch.reward_PK.argmax(dim=1), batch.reward_PK.argmin(dim=1)
    swapped = torch.tensor([False, True, False])
    halves = torch.cat([torch.where(swapped, worst, best), torch.where(swapped, best, worst)])
    rows = (torch.arange(P).repeat(2) * K + halves).tolist()
    trainer = OnlineDPOTrainer(
        model=copy.deepcopy(weights.current),
        ref_model=copy.deepcopy(weights.reference),
        reward_funcs=lambda completions, **_: batch.reward_PK.flatten()[rows].tolist(),
        args=OnlineDPOConfig(**settings(folder, beta=beta, loss_type="sigmoid", missing_eos_penalty=None)),
        train_dataset=dataset(),
        processing_class=tiny_tokenizer(),
    )
    prompts, responses = prompts_of(batch), responses_of(batch)
    prompt_ids, prompt_mask = _padded([prompts[row] for row in rows], side="left")
    response_ids, response_mask = _padded([responses[row] for row in rows], side="right")
    trainer._generate = lambda model, prompts, images: (prompt_ids, prompt_mask, response_ids, response_mask, None)
    loss = trainer.training_step(trainer.model, {"prompt": ["w3 w4"] * P})
    return loss, gradient_of(trainer.model)


def _padded(rows: list[list[int]], *, side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask, with the pad token 0."""
    tensors = [torch.tensor(row) for row in rows]
    ids, mask = (
        nn.utils.rnn.pad_sequence(part, batch_first=True, padding_side=side)
        for part in (tensors, [torch.ones_like(row) for row in tensors])
    )
    return ids, mask


# ------------------------------------------------------------------------------------------------ comparisons
def assert_same(mine: tuple[Loss, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    (loss, gradient), (trl_loss, trl_gradient) = mine, theirs
    print(f"loss {loss.value.item():+.8f}, TRL's {trl_loss.item():+.8f}, {loss.metrics}")
    assert abs(loss.value.item()) > 1e-3, "a loss near zero proves nothing"
    assert loss.value.item() == pytest.approx(trl_loss.item(), abs=1e-5)
    assert_same_gradient(gradient, trl_gradient)


def assert_same_gradient(gradient: Tensor, trl_gradient: Tensor) -> None:
    difference = ((gradient - trl_gradient).norm() / trl_gradient.norm()).item()
    print(f"gradient norm {trl_gradient.norm().item():.4f}, relative difference {difference:.1e}")
    assert difference < 1e-4


def some_words() -> Tensor:
    """A loss mask with words of a tool: within a response, at its start, at its end."""
    mask_N = torch.ones(sum(map(sum, LENGTHS)), dtype=torch.bool)
    mask_N[[1, 3, 9, 17]] = False
    return mask_N


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_grpo_is_that_of_trl(tmp_path, beta, temperature):
    weights = three_weights(noise=0.01)
    batch = ours(weights, temperature=temperature)
    mine = our_loss(GRPO(clip=0.1, clip_high=0.15), weights, batch, beta=beta, temperature=temperature)
    assert 0.1 < mine[0].metrics["objective/clip_fraction"] < 0.9
    config = {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.15, "beta": beta, "temperature": temperature}
    assert_same(mine, trl_grpo(weights, batch, tmp_path, **config))


def test_grpo_leaves_out_the_tokens_that_trl_leaves_out(tmp_path):
    weights = three_weights(noise=0.01)
    batch = ours(weights, temperature=1.0, mask_N=some_words())
    mine = our_loss(GRPO(), weights, batch, beta=0.1, temperature=1.0)
    assert_same(mine, trl_grpo(weights, batch, tmp_path, loss_type="grpo", epsilon=0.2, beta=0.1, temperature=1.0))


CLIPS = {"epsilon": 0.1, "epsilon_high": 0.15}
OUR_CLIPS = {"clip": 0.1, "clip_high": 0.15}
PER_RESPONSE = {"importance_sampling_level": "sequence"}
NO_STD = {"scale_rewards": "none"}
AS_IN_TRL: list[tuple[Objective, dict[str, Any]]] = [
    (GRPO(**OUR_CLIPS, scale_rewards=False), {"loss_type": "grpo", **NO_STD, **CLIPS}),
    (GRPO(**OUR_CLIPS, aggregate="tokens"), {"loss_type": "dapo", **CLIPS}),
    (GRPO(**OUR_CLIPS, aggregate="tokens"), {"loss_type": "bnpo", **CLIPS}),
    (GRPO(**OUR_CLIPS, max_ratio=1.3), {"loss_type": "grpo", "delta": 1.3, **CLIPS}),
    (GRPO(clip=0.01, clip_high=0.02, ratio="sequence"),
     {"loss_type": "grpo", "epsilon": 0.01, "epsilon_high": 0.02, **PER_RESPONSE}),
    (GRPO(surrogate="cispo", clip_high=1.1, aggregate="tokens"), {"loss_type": "cispo", "epsilon_high": 1.1}),
    (GRPO(surrogate="cispo", aggregate="tokens"), {"loss_type": "cispo"}),
    (GRPO(surrogate="sapo"), {"loss_type": "sapo"}),
    (GRPO(surrogate="sapo", ratio="sequence"), {"loss_type": "sapo", **PER_RESPONSE}),
    (GRPO(surrogate="vespo", aggregate="tokens"), {"loss_type": "vespo"}),
    (GRPO(surrogate="sapo", off_policy_mask=0.02), {"loss_type": "sapo", "off_policy_mask_threshold": 0.02}),
    (GRPO(**OUR_CLIPS, top_entropy=0.4), {"loss_type": "grpo", "top_entropy_quantile": 0.4, **CLIPS}),
    (GRPO(**OUR_CLIPS, aggregate="tokens", top_entropy=0.2),
     {"loss_type": "dapo", "top_entropy_quantile": 0.2, **CLIPS}),
    (DrGRPO(**OUR_CLIPS, normal_length=MAX_NEW_TOKENS, scale_rewards=True), {"loss_type": "dr_grpo", **CLIPS}),
    (DrGRPO(clip=0.01, clip_high=0.02, ratio="sequence", normal_length=1, scale_rewards=True),
     {"loss_type": "luspo", "epsilon": 0.01, "epsilon_high": 0.02, **PER_RESPONSE}),
]  # fmt: skip
"""The settings of ours that are TRL's, as the table of docs/algorithm.md has them."""


@pytest.mark.parametrize(("objective", "config"), AS_IN_TRL, ids=[str(config) for _, config in AS_IN_TRL])
def test_settings_of_grpo_are_those_of_trl(tmp_path, objective, config):
    beta, weights = 0.1, three_weights(noise=0.01)
    batch = ours(weights, temperature=0.7, mask_N=some_words())
    mine = our_loss(objective, weights, batch, beta=beta, temperature=0.7)
    for share in ("objective/clip_fraction", "objective/masked"):
        if share in mine[0].metrics and config != {"loss_type": "cispo"}:
            assert 0.05 < mine[0].metrics[share] < 0.95, share
    assert_same(mine, trl_grpo(weights, batch, tmp_path, **config, beta=beta, temperature=0.7))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_dr_grpo_is_that_of_trl(tmp_path, beta):
    weights = three_weights(noise=0.01)
    batch = ours(weights, temperature=1.0, mask_N=some_words())
    objective = DrGRPO(clip=0.1, clip_high=0.15, normal_length=MAX_NEW_TOKENS)
    mine = our_loss(objective, weights, batch, beta=beta, temperature=1.0)
    assert 0.1 < mine[0].metrics["objective/clip_fraction"] < 0.9
    config = {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon": 0.1, "epsilon_high": 0.15, "beta": beta}
    assert_same(mine, trl_grpo(weights, batch, tmp_path, **config, temperature=1.0))


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_proximal_rloo_is_the_rloo_of_trl(tmp_path, beta, temperature):
    weights = three_weights(noise=0.01)
    batch = ours(weights, temperature=temperature)
    mine = our_loss(ProximalRLOO(clip=0.2), weights, batch, beta=beta, temperature=temperature)
    assert 0.1 < mine[0].metrics["objective/clip_fraction"] < 0.9
    assert_same(mine, trl_rloo(weights, batch, tmp_path, epsilon=0.2, beta=beta, temperature=temperature))


def test_on_fresh_data_the_gradient_of_rloo_is_that_of_trl(tmp_path):
    weights = three_weights(noise=0.01)
    weights = replace(weights, current=weights.old)
    batch = ours(weights, temperature=1.0)
    _, gradient = our_loss(RLOO(), weights, batch, beta=0.1, temperature=1.0)
    _, trl_gradient = trl_rloo(weights, batch, tmp_path, epsilon=0.2, beta=0.1, temperature=1.0)
    assert_same_gradient(gradient, trl_gradient)


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_online_dpo_is_that_of_trl(tmp_path, beta):
    weights = three_weights(noise=0.05)
    batch = ours(weights, temperature=1.0)
    mine = our_loss(OnlineDPO(), weights, batch, beta=beta, temperature=1.0)
    assert_same(mine, trl_online_dpo(weights, batch, tmp_path, beta=beta))
