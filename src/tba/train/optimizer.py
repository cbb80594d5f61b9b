"""AdamW over fp32 master weights, and the learning rate of each step: a schedule that was given, or `auto`.

What a rate does depends on the size of the model, on LoRA, on the state of Adam, on the length of responses and on how sure
the policy is; what can be chosen once for all of them is the movement. After an update some responses of its batch are
scored again, and their mean |change of log_pi|, in units of the square root of their entropy (in fp32 of at most 10 nats),
is compared with train.movement: the rate is multiplied so that the next steps come nearer to it. How far a step should move
depends on how much of it is signal, and that can be measured for nothing: on responses that are not trained on yet, the
drift of the policy since they were generated is the work of other updates, and its correlation with their rewards is the
share of signal in it. The movement asked for follows that agreement, as long as the policy stays near the one that generated
its data. The rate begins at a tenth of a guess from the size of the model, so that a guess ten times too high does no harm;
once it is found it rises only slowly; and in the last part of the run (train.settle) it falls to zero, so that the noise of
single steps averages out.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tba.config import Config, TrainConfig
from tba.models.sharding import local_part
from tba.train.offloaded_adam import OffloadedAdamW
from tba.train.ranks import ALONE, Ranks


class MasterAdamW:
    """AdamW whose weights and gradient sums are fp32.

    A bf16 model keeps an fp32 copy here: at learning rates of 1e-6 most updates would round away in bf16. An fp32 model
    is its own master. Of a model that is spread over ranks, each has the optimizer of its own part; heads are whole on every
    rank.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: TrainConfig,
        *,
        heads: Iterable[nn.Parameter] = (),
        heads_rate: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`heads` are trained beside the policy, clipped by a norm of their own, at `heads_rate` (None = the policy's)."""
        policy = [parameter for parameter in parameters if parameter.requires_grad]
        own = [parameter for parameter in heads if parameter.requires_grad]
        self.parameters = policy + own
        self._parts = [local_part(parameter) for parameter in self.parameters]
        """What of each parameter is on this rank, in the parameter's own memory."""
        self.masters = [_master_of(parameter, part) for parameter, part in zip(self.parameters, self._parts)]
        self._policy, self._heads = self.masters[: len(policy)], self.masters[len(policy) :]
        self._heads_rate = heads_rate
        self._ranks = ranks
        self.max_grad_norm = config.max_grad_norm
        groups = [{"params": group} for group in (self._policy, self._heads) if group]
        settings: dict[str, Any] = {"betas": config.adam_betas, "eps": config.adam_epsilon}
        settings |= {"lr": 0.0, "weight_decay": config.weight_decay}
        self.adam: torch.optim.AdamW
        if config.offload_optimizer:
            self.adam = OffloadedAdamW(groups, **settings)
        else:
            self.adam = torch.optim.AdamW(groups, fused=True, **settings)

    def accumulate(self) -> None:
        """Add the model's gradients of one micro-batch to the fp32 sums; an fp32 model adds them up itself."""
        first: list[tuple[nn.Parameter, Tensor]] = []
        further: list[tuple[nn.Parameter, Tensor]] = []
        for parameter, part, master in zip(self.parameters, self._parts, self.masters):
            if master is parameter or parameter.grad is None:
                continue
            gradient = local_part(parameter.grad)
            if part.dtype == torch.float32:
                master.grad = gradient
                continue
            (first if master.grad is None else further).append((master, gradient))
            parameter.grad = None
        _add(first, is_first=True)
        _add(further, is_first=False)

    def clip_gradients(self) -> Tensor:
        """Scale gradients down to max_grad_norm; returns the policy's norm before (the heads' if that is not finite).
        Non-finite norms leave gradients alone."""
        if self._ranks.size > 1:
            for head in self._heads:  # each rank has that of its own micro-batches, of a loss that counts `size` times
                head.grad = torch.zeros_like(head) if head.grad is None else head.grad
                self._ranks.sum_(head.grad).div_(self._ranks.size)
        norm = self._clip(self._policy, spread=self._ranks.size > 1)
        if not self._heads:
            return norm
        heads_norm = self._clip(self._heads, spread=False)
        return torch.where(torch.isfinite(heads_norm), norm.to(heads_norm.device), heads_norm)

    def _clip(self, masters: list[nn.Parameter], *, spread: bool) -> Tensor:
        """`spread`: each rank has other gradients, all of which make up one norm."""
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        if spread:
            norm = self._ranks.sum_(norm.square()).sqrt()
        gradients = [master.grad for master in masters if master.grad is not None]
        if self.max_grad_norm is not None and gradients:
            # Not clip_grads_with_norm_, which makes all gradients NaN where one is: to ask first is to wait for the device.
            factor = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), factor, 1.0))
        return norm

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start Adam's moments of these parameters anew, as after they were given other values."""
        self._settle()
        forgotten = {id(parameter) for parameter in parameters}
        for parameter, master in zip(self.parameters, self.masters):
            if id(parameter) in forgotten:
                self.adam.state.pop(master, None)

    @torch.no_grad()
    def step(self, learning_rate: float, *, unless: Tensor | None = None) -> None:
        """Move the weights and drop the gradients. Where `unless` (fp32 [], on the device) is not 0 nothing moves, which the
        host need not know."""
        for index, group in enumerate(self.adam.param_groups):
            group["lr"] = learning_rate if index == 0 or self._heads_rate is None else self._heads_rate
        # What the fused kernels look at: torch's own gradient scaler skips steps by it.
        self.adam.found_inf = unless  # type: ignore[attr-defined]
        self.adam.step()
        self.adam.found_inf = None  # type: ignore[attr-defined]
        self.drop_gradients()
        rounded = self._rounded()
        if rounded:
            torch._foreach_copy_([part for part, _ in rounded], [master for _, master in rounded])

    def _rounded(self) -> list[tuple[Tensor, nn.Parameter]]:
        """Parameters that are held in less than fp32, each with its master."""
        return [(part, master) for part, master in zip(self._parts, self.masters) if part.dtype != torch.float32]

    @contextmanager
    def extrapolated(self, factor: float) -> Iterator[float]:
        """While this lasts, weights in less than fp32 lie `factor` times as far from where they were before the last step;
        yields the factor, 1 for an fp32 model.

        Rounded to bf16, a step of 1e-6 changes log_pi less by what it does than by which weights happen to be rounded the
        other way: a longer step along the same line can be measured.
        """
        policy = list(zip(self._parts, self._policy))
        rounded = [
            (part, master) for part, master in policy if part.dtype != torch.float32 and master in self.adam.state
        ]
        if any(part.dtype == torch.float32 for part, _ in policy):
            rounded = []  # those in fp32 would be measured where they are
        with torch.no_grad():
            for part, master in rounded:
                part.copy_(master + (factor - 1.0) * self._last_update(master))
        try:
            yield factor if rounded else 1.0
        finally:
            with torch.no_grad():
                for part, master in rounded:
                    part.copy_(master)

    def _last_update(self, master: nn.Parameter) -> Tensor:
        """What the last step added to a policy weight."""
        group = self.adam.param_groups[0]
        self._settle()
        state = {name: value.to(master.device) for name, value in self.adam.state[master].items()}
        (beta1, beta2), steps = group["betas"], float(state["step"])
        mean = state["exp_avg"] / (1.0 - beta1**steps)
        spread = (state["exp_avg_sq"] / (1.0 - beta2**steps)).sqrt() + group["eps"]
        return -group["lr"] * (mean / spread + group["weight_decay"] * master)

    def drop_gradients(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Tensors and numbers of the optimizer, for a checkpoint."""
        self._settle()
        moments = {
            index: dict(self.adam.state[master])
            for index, master in enumerate(self.masters)
            if master in self.adam.state
        }
        return {"masters": [master.detach() for master in self.masters], "moments": moments}

    def _settle(self) -> None:
        """Wait until Adam's state is that after all steps so far."""
        if isinstance(self.adam, OffloadedAdamW):
            self.adam.settle()

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over master weights, which the model then holds too, and Adam's moments of those that have any."""
        for part, master, saved in zip(self._parts, self.masters, state["masters"], strict=True):
            master.copy_(saved)
            if part.dtype != torch.float32:
                part.copy_(master)
        self._settle()
        self.adam.state.clear()
        for index, moments in state["moments"].items():
            master = self.masters[index]
            if isinstance(self.adam, OffloadedAdamW):
                self.adam.take(master, moments)
            else:
                self.adam.state[master] = {name: value.to(master.device) for name, value in moments.items()}


def _add(pairs: list[tuple[nn.Parameter, Tensor]], *, is_first: bool) -> None:
    """Add gradients in less than fp32 to those of their masters, which have none yet where they are the first."""
    if not pairs:
        return
    masters, gradients = zip(*pairs)
    if gradients[0].is_cuda and importlib.util.find_spec("triton") is not None:
        from tba.kernels.gradients import accumulate, can_accumulate

        sums = None if is_first else [master.grad for master in masters]
        if can_accumulate(sums, gradients):
            for master, total in zip(masters, accumulate(sums, gradients)):
                master.grad = total
            return
    if is_first:
        for master, gradient in pairs:
            master.grad = gradient.float()
    else:
        torch._foreach_add_([master.grad for master in masters], list(gradients))


def _master_of(parameter: nn.Parameter, part: Tensor) -> nn.Parameter:
    """An fp32 parameter is its own master; of one that is spread over ranks, the part that is here, in its memory."""
    if part is parameter and parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(part if part.dtype == torch.float32 else part.detach().float().clone())


FIRST_SHARE = 0.1
"""Of the guess: Adam's first steps are full ones, whatever the gradient."""
MAX_RISE, MAX_FALL = 1.25, 0.67
"""Factors in one step: a hundredfold rise takes 21 steps, a tenfold fall 6."""
GAIN = 0.3
"""Exponent of the correction: the movement of a few responses is a noisy measure."""
FURTHEST = 30.0
"""The rate stays within this factor of the guess: where nothing is left to learn there is no movement to follow."""
USUAL_AGREEMENT, AGREEMENT_STEPS = 0.1, 33
"""What is assumed at first, and the steps that the mean goes over: of one batch of 128 responses it is known to .09."""
LEAST_SHARE, MOST_SHARE = 0.7, 1.5
"""Bounds of what the agreement multiplies train.movement by. Near the end of what can be learned an agreement of .01 is
within its noise, while larger steps than a fifth of the movement still learn."""
LARGEST_KL, KL_STEPS = 0.2, 8
"""Nats per response between the policy that generated a batch and the one that trains on it, and the steps that its mean is
over. At .2 about two thirds of the responses still count (the effective sample size, exp(-2 KL) for a normal drift)."""
FAR_KL = 0.4
"""Beyond this distance in the last batch the next update is smaller in proportion: a policy that runs away from its data
does so within three or four steps, where the mean and the corrected rate follow in ten."""
LEAST_SHAPE = 0.2
"""Below this share of its height the rate only falls: movements become too small to measure well."""
MEASURED_STEPS, MEASURED_EVERY = 40, 4
"""The movement is measured after every one of the first steps, later after every fourth: it costs a forward pass over a few
responses."""
LATER_RISE = 1.02
"""Largest factor by one of the later measurements, half a percent a step, beyond the highest rate of the first steps: the
rate is taken for found. Where little is left to learn most gradients become small and rare ones do not: a rate that makes up
for the first goes too far by the others. Up to that highest rate it comes back as fast as it was found, from wherever the
distance to the data, or a step that went too far, has sent it."""


@dataclass
class LearningRate:
    """The rate in use; what it has learned is part of a checkpoint."""

    config: Config
    exact_drift: bool = True
    """Whether the policy computes in fp32. Elsewhere the drift of log_pi over one or two steps is mostly rounding, different
    in engine and trainer, and its agreement with the rewards says nothing."""
    rate: float = field(init=False)
    """Learning rate of `auto`, before it falls at the end of the run."""
    agreement: float = field(init=False, default=USUAL_AGREEMENT)
    """Mean over the last steps of the correlation between the policy's drift and the rewards of unseen responses."""
    factor: float = field(init=False, default=1.0)
    """What multiplies the given schedule, or the movement of `auto`: less than 1 after a collapse (observe.on_collapse)."""
    found: float = field(init=False, default=0.0)
    """Highest rate of the first steps: up to it the rate may rise again as fast as at first."""
    kl: float = field(init=False, default=0.0)
    """Mean over the last steps of the KL between the policies that generated and that train."""
    caution: float = field(init=False, default=1.0)
    """What multiplies the rate of the next update: less than 1 while the policy is far from its data."""

    def __post_init__(self) -> None:
        self.rate = FIRST_SHARE * self.guess

    @property
    def is_auto(self) -> bool:
        return self.config.train.learning_rate is None

    @property
    def guess(self) -> float:
        return self.config.train.first_learning_rate or 0.0

    def at(self, step: int, progress: float) -> float:
        """For optimizer step `step` (0 is the first), before which `progress` (0 to 1) of the run is done."""
        if self.is_auto:
            return (
                self.rate * self.shape(progress) * self.caution
            )  # `factor` is in the rate, which follows the movement
        return self.factor * self.config.learning_rate_at(step, progress)

    def shape(self, progress: float) -> float:
        """1, then in the last part of the run a straight line to 0."""
        settle = self.config.train.settle
        return min(1.0, (1.0 - progress) / settle) if settle > 0 else 1.0

    def measures(self, step: int, progress: float) -> bool:
        """Whether this step's movement is asked for."""
        due = step < MEASURED_STEPS or step % MEASURED_EVERY == 0
        return self.is_auto and due and self.shape(progress) >= LEAST_SHAPE

    def follow(self, step: int, metrics: Mapping[str, float], progress: float) -> None:
        """Takes what was measured of this step, and at what progress it was made: `off_policy/agreement`, and now and then
        `movement`."""
        sees_drift = self.is_auto and self.can_see_agreement
        if sees_drift:
            self.agreement += (metrics.get("off_policy/agreement", self.agreement) - self.agreement) / AGREEMENT_STEPS
            self.kl += (metrics.get("off_policy/kl", self.kl) - self.kl) / KL_STEPS
        if "movement" in metrics:
            self._correct(step, metrics["movement"], progress)  # by the caution that this step was made with
        if sees_drift:
            self.caution = FAR_KL / max(FAR_KL, metrics.get("off_policy/kl", 0.0))

    def _correct(self, step: int, moved: float, progress: float) -> None:
        wanted = self.wanted * self.shape(progress) * self.caution / max(moved, 1e-12)
        if self.kl > LARGEST_KL:
            wanted = min(wanted, math.sqrt(LARGEST_KL / self.kl))  # the KL grows with the square of the movement
        factor = wanted**GAIN
        rate = self.rate * min(MAX_RISE, max(MAX_FALL, factor))
        if step >= MEASURED_STEPS:
            rate = min(rate, max(self.found, self.rate * LATER_RISE))
        self.rate = min(FURTHEST * self.guess, max(self.guess / FURTHEST, rate))
        if step < MEASURED_STEPS:
            self.found = max(self.found, self.rate)

    @property
    def wanted(self) -> float:
        """train.movement, in proportion to the agreement, and less where each response is trained several times: what the
        policy moves between generating and training a response grows with the steps between them.

        A step of length m gains m x agreement and loses by its noise in proportion to m^2: the best m is in proportion to
        the agreement.
        """
        share = min(MOST_SHARE, max(LEAST_SHARE, self.agreement / USUAL_AGREEMENT))
        trained = max(1.0, self.config.replay.max_trained_per_generated or 1.0)
        trained *= 2.0 if self.config.train.second_update_after else 1.0
        return self.factor * share * self.config.train.movement / math.sqrt(trained)

    def soften(self, factor: float) -> None:
        """Go on with another `factor`, at once: the movement is followed only over many steps."""
        gentler = factor / self.factor
        self.rate, self.found, self.factor = self.rate * gentler, self.found * gentler, factor

    @property
    def can_see_agreement(self) -> bool:
        """Whether responses are unseen when they are trained on, so that their drift is a test of earlier updates, and
        whether it is exact enough to see that."""
        return self.exact_drift and self.config.replay.max_uses == 1 and self.config.train.updates_per_batch == 1

    def state(self) -> dict[str, Any]:
        rates = {"rate": self.rate, "found": self.found, "factor": self.factor}
        return {**rates, "agreement": self.agreement, "kl": self.kl, "caution": self.caution}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.rate, self.agreement = state["rate"], state["agreement"]
        # An older version has not saved these.
        self.factor, self.kl, self.found = state.get("factor", 1.0), state.get("kl", 0.0), state.get("found", 0.0)
        self.caution = state.get("caution", 1.0)
