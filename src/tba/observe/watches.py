"""Warnings during a run, and their numbers in its summary. They watch whether searchers and trainer compute the same,
whether beta fits the rewards, and whether rewards differ at all."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the supervisor imports this without torch
    from tba.types import TrajectoryGroup

logger = logging.getLogger("tba")

FIRST = 5
"""Measurements whose largest is the yardstick, of the canaries of all searchers and of the responses."""
MULTIPLE = 10.0
"""The limit divided by the yardstick. A KL grows with the square of the gap: this is about 3 times the gap, where the
canary's own check ends the run at 5 times."""
LEAST_LIMITS = {"canary": 1e-6, "responses": 1e-4}
"""Least limits in nats per token: gaps of .001 nats do nothing to training, however exact the first versions were; and
responses may have keys and values of older weights in their prompts, which is no fault."""
LASTING = {"canary": 3, "responses": 1}
"""Measurements one after the other that have to be beyond the limit. The canary's tokens are chosen at random, and a policy
that has learned gives some of them next to no probability: in bf16 single ones are then far apart at one version and near at
the next, where an engine with wrong weights stays wrong."""

REACHED, SPREAD = "tb/target_reached", "tb/reward_spread"
FIRST_SPREADS = 4
"""Batches whose mean spread is reported at the start: one batch of sparse rewards says little."""
RECENT = 20
"""Batches over which the share that was reached is averaged."""
FEW_NATS = 4.0
"""Spread of the rewards in units of beta below which the target is near: a normal reward has it at a KL of 4^2 / 2 nats."""
GOOD_NATS = 20.0
"""Spread of the rewards in units of beta that a proposed beta gives."""
NEAR = 0.4
"""Share of the way to the target from which on beta limits the reward (notes/)."""

FIRST_WARNING, WARN_AGAIN_TIMES = 64, 8
"""Number of responses after which it is said that their rewards do not differ, and the factor until it is said again."""
SAMPLES = 2
"""Responses that are kept to be shown."""
LONGEST_SAMPLE = 200
"""Characters of a prompt and a response that are shown."""


@dataclass
class MismatchWatch:
    """The standing check on weights: do searchers compute what the trainer computes, at one version? Warns once for each
    rise of a mismatch beyond its limit that lasts.

    Two measures of it, in nats per token (`kl_estimate` in models/weights.py): `off_policy/mismatch_kl` of what searchers
    really generate (trainer/mismatch.py), and `searcher/i/mismatch_kl` of the canary's tokens, for every version that a
    searcher compares. Rounding makes both greater than zero, by how much depends on model, precision and kernels. So they
    are judged by what they were at the first versions, where both sides surely hold the same weights, as the canary's own
    check does, which ends the run at a larger gap.
    """

    _first: dict[str, list[float]] = field(default_factory=dict)
    """The first measurements, by what they are of."""
    _last: dict[str, float] = field(default_factory=dict)
    """The newest measurement, by metric: one that stays for several steps counts once."""
    _in_a_row: dict[str, int] = field(default_factory=dict)
    """Number of measurements beyond the limit, one after the other, by metric."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if not name.endswith("/mismatch_kl") or math.isnan(value) or value == self._last.get(name):
                continue
            self._last[name] = value
            measure = "canary" if name.startswith("searcher/") else "responses"
            first = self._first.setdefault(measure, [])
            if len(first) < FIRST:
                first.append(value)
                continue
            # The largest of the first few: one small gap by chance would make every later one look large.
            yardstick = max(first)
            limit = max(MULTIPLE * yardstick, LEAST_LIMITS[measure])
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if value > limit else 0
            if self._in_a_row[name] == LASTING[measure]:
                logger.warning(
                    "step %d: %s is %.3g nats per token, at the first versions it was at most %.3g, the limit is %.3g (%g "
                    "times that, at least %g): searchers no longer compute what the trainer computes. Compare with a run of "
                    "generate.engine=transformers or model.dtype=float32.",
                    *(step, name, value, yardstick, limit, MULTIPLE, LEAST_LIMITS[measure]),
                )


@dataclass
class BetaWatch:
    """Does beta fit the rewards? Trajectory balance aims at pi_ref exp(r / beta): how far that is from the reference depends
    on how far the rewards of one prompt lie apart, in units of beta, and beyond it nothing can be earned.

    Told to the user: at the first rewards both numbers beside each other; during the run, once, when the policy has come
    near the target and rewards still differ; at the end what was reached.
    """

    _spreads: list[float] = field(default_factory=list)
    """Spreads of the first batches."""
    _reached: list[tuple[float, float]] = field(default_factory=list)
    """Shares reached in the last batches, with the spread of their rewards."""
    _beta: float = 0.0
    _spread: float = 0.0
    """The last ones."""
    _warned_near: bool = False

    def step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Take a step's metrics; without those of trajectory balance they say nothing. Returns a line for the screen, once,
        where all is well; what is not is a warning."""
        spread = metrics.get(SPREAD, 0.0)
        if not (math.isfinite(spread) and spread > 0.0 and math.isfinite(metrics[REACHED]) and metrics["beta"] > 0.0):
            return None
        self._beta, self._spread, line = metrics["beta"], metrics[SPREAD], None
        if len(self._spreads) < FIRST_SPREADS:
            self._spreads.append(self._spread)
            if len(self._spreads) == FIRST_SPREADS:
                line = self._first_line(sum(self._spreads) / FIRST_SPREADS)
        self._reached = [*self._reached, (metrics[REACHED], spread)][-RECENT:]
        # Only over full windows: the share of a few batches is noise.
        if len(self._reached) == RECENT and self.is_near and not self._warned_near:
            self._warned_near = True
            logger.warning("step %d: %s", step, self.message)
        return line

    @property
    def reached(self) -> float:
        """Share of the way from the reference to the target, over the last batches: each counts as the square of its spread,
        as the rewards of one large batch would."""
        squares = sum(spread**2 for _, spread in self._reached)
        return sum(share * spread**2 for share, spread in self._reached) / squares if squares else 0.0

    @property
    def is_near(self) -> bool:
        return self.reached > NEAR

    @property
    def message(self) -> str:
        return (
            f"the policy has come {min(1.0, self.reached):.0%} of the way to what objective.beta={self._beta:g} aims at, "
            f"while the rewards of one prompt still lie {self._spread:.2g} apart (standard deviation): a lower beta lets it "
            f"earn more, for example {self._beta / 5:.1g}."
        )

    def summary(self) -> dict[str, Any] | None:
        """{"beta": 0.05, "reward_spread": 0.11, "target_reached": 0.62, "words": "..."}, words where beta holds the run
        back; None where there is no target, or rewards never differed."""
        if not self._reached:
            return None
        return {
            "beta": self._beta,
            "reward_spread": float(f"{self._spread:.3g}"),
            "target_reached": round(self.reached, 3),
            "message": self.message if self.is_near and len(self._reached) == RECENT else None,
        }

    def _first_line(self, spread: float) -> str | None:
        nats = spread / self._beta
        message = (
            f"rewards of one prompt lie {spread:.2g} apart (standard deviation), which is {nats:.2g} times "
            f"objective.beta={self._beta:g}"
        )
        if nats >= FEW_NATS:
            return f"{message}."
        logger.warning(
            "%s: the target is near the reference, and little can be earned. Set objective.beta=%g or lower, or give the "
            "rewards a larger weight.",
            *(message, rounded_beta(spread / GOOD_NATS)),
        )
        return None


def rounded_beta(value: float) -> float:
    """The value rounded down to 1, 2 or 5 times a power of ten: rounded_beta(0.0078) == 0.005"""
    power = 10.0 ** math.floor(math.log10(value))
    return float(f"{max(digit for digit in (1, 2, 5) if digit * power <= value * (1 + 1e-9)) * power:.0e}")


@dataclass
class RewardSignal:
    """Looks at the rewards of a run until two responses to one prompt differ in theirs. Where they never do, as with a
    reward that is always 0, nothing can be learned, and a run would look healthy all the same."""

    differs: bool = False
    responses: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Responses with their rewards, each of another group."""
    _by_prompt: dict[str, float] = field(default_factory=dict)
    """The reward that all responses to a prompt have had, by its id."""
    _warned_at: int = FIRST_WARNING

    def count(self, group: TrajectoryGroup, rewards: Sequence[float], texts: Callable[[], Sequence[str]]) -> None:
        """Take a group that has come; `rewards` are those that are trained on, NaN where none is applicable."""
        known = [reward for reward in rewards if not math.isnan(reward)]
        if self.differs or not known:
            return
        self.responses += len(known)
        self.lowest, self.highest = min(self.lowest, *known), max(self.highest, *known)
        # Within a prompt only: rewards of different prompts may differ without any signal in a group.
        own = self._by_prompt.setdefault(group.prompt.id, known[0])
        # Of single responses only those to different prompts can be compared.
        self.differs = any(reward != own for reward in known) or (len(known) == 1 and self.lowest < self.highest)
        if self.differs:
            # Nothing is compared any more, and both are part of every checkpoint.
            self._by_prompt, self.samples = {}, []
            return
        if len(self.samples) < SAMPLES:
            index = next(i for i, reward in enumerate(rewards) if not math.isnan(reward))
            cut_off = group.trajectories[index].completion.finish == "length"
            shown = {"prompt": group.prompt.text[-LONGEST_SAMPLE:], "response": texts()[index][:LONGEST_SAMPLE]}
            self.samples.append({**shown, "reward": own, "cut_off": cut_off})
        if self.responses >= self._warned_at:
            self._warned_at = WARN_AGAIN_TIMES * self.responses
            logger.warning("so far %s. Look at samples.jsonl and at the reward function.", self.message)

    @property
    def warning(self) -> str | None:
        """Warning during the run; None = rewards differ, or there are too few responses yet to say."""
        return None if self.differs or self.responses < FIRST_WARNING else self.message

    @property
    def message(self) -> str:
        if self.lowest == self.highest == 0.0:
            return f"no response was rewarded: {self.responses} responses, all 0.0"
        if self.lowest == self.highest:
            return f"all responses have the same reward: {self.responses} responses, all {self.lowest:g}"
        return (
            f"all rewards within each prompt are equal, so there is no gradient: {self.responses} responses to "
            f"{len(self._by_prompt)} prompts"
        )

    def summary(self) -> dict[str, Any] | None:
        """{"responses": 256, "words": "no response was rewarded ...", "samples": [{"prompt": ..., "response": ..., "reward":
        0.0, "cut_off": False}, ...]}; None = rewards differ, or none has come."""
        if self.differs or not self.responses:
            return None
        return {"responses": self.responses, "message": self.message, "samples": [dict(s) for s in self.samples]}


@dataclass
class LostResponses:
    """Counts the responses that rewards failed on. The first is reported at once, then every tenfold number: a reward that
    fails now and then must not fill the screen, and one that fails often must not go unseen."""

    generated: int = 0
    lost: int = 0
    last: str = ""
    """Why the last of them was lost."""
    _warned_at: int = 1

    def count(self, *, generated: int, lost: int, why: str) -> None:
        self.generated += generated
        if not lost:
            return
        self.lost += lost
        self.last = why[:500] or self.last
        # At 1, 10, 100, ...: a reward that fails in every group may lose thousands at a time.
        if self.lost >= self._warned_at:
            while self._warned_at <= self.lost:
                self._warned_at *= 10
            message = "%d of %d responses have no reward and are not trained on, the last: %s"
            logger.warning(message, self.lost, self.generated, self.last)

    def summary(self) -> dict[str, Any] | None:
        """{"responses": 48, "share": 0.5, "last": "score failed at r.py:3: KeyError: 'a'"}; None = none was lost."""
        if not self.lost:
            return None
        return {"responses": self.lost, "share": round(self.lost / max(1, self.generated), 4), "last": self.last}


def no_signal_lines(found: Mapping[str, Any], *, max_new_tokens: int) -> list[str]:
    """Message at the end of a run in which nothing could be learned."""
    lines = [f"{found['message']}. Nothing could be learned. Two of them:"]
    for sample in found["samples"]:
        cut = f", cut off at generate.max_new_tokens={max_new_tokens}" if sample["cut_off"] else ""
        lines.append(
            f"  prompt {sample['prompt']!r}, response {sample['response']!r}, reward {sample['reward']:g}{cut}"
        )
    return lines
