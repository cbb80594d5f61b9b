"""What rewards say of a run as a whole: whether they tell the responses to one prompt apart, and how many they failed on.

Where they never differ, as with a reward that is always 0, nothing can be learned, and a run would look healthy all the
same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the supervisor imports this without torch
    from tba.types import TrajectoryGroup

logger = logging.getLogger("tba")

FIRST_TOLD, TOLD_TIMES = 64, 8
"""Number of responses after which it is said that their rewards do not differ, and the factor until it is said again."""
SAMPLES = 2
"""Responses that are kept to be shown."""
LONGEST_SAMPLE = 200
"""Characters of a prompt and a response that are shown."""
LONGEST_WORDS = 500
"""Characters of a reason that are kept."""


@dataclass
class RewardSignal:
    """Looks at the rewards of a run until two responses to one prompt differ in theirs."""

    differs: bool = False
    responses: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Responses with their rewards, each of another group."""
    _by_prompt: dict[str, float] = field(default_factory=dict)
    """The reward that all responses to a prompt have had, by its id."""
    _told_at: int = FIRST_TOLD

    def count(self, group: TrajectoryGroup, rewards: Sequence[float], texts: Callable[[], Sequence[str]]) -> None:
        """Take a group that has come; `rewards` are those that are trained on, NaN where none is applicable."""
        known = [reward for reward in rewards if not math.isnan(reward)]
        if self.differs or not known:
            return
        self.responses += len(known)
        self.lowest, self.highest = min(self.lowest, *known), max(self.highest, *known)
        own = self._by_prompt.setdefault(group.prompt.id, known[0])
        # Of single responses only those to different prompts can be compared.
        self.differs = any(reward != own for reward in known) or (len(known) == 1 and self.lowest < self.highest)
        if self.differs:
            self._by_prompt, self.samples = {}, []
            return
        if len(self.samples) < SAMPLES:
            index = next(i for i, reward in enumerate(rewards) if not math.isnan(reward))
            cut_off = group.trajectories[index].completion.finish == "length"
            shown = {"prompt": group.prompt.text[-LONGEST_SAMPLE:], "response": texts()[index][:LONGEST_SAMPLE]}
            self.samples.append({**shown, "reward": own, "cut_off": cut_off})
        if self.responses >= self._told_at:
            self._told_at = TOLD_TIMES * self.responses
            logger.warning("so far %s. Look at samples.jsonl and at the reward function.", self.words)

    @property
    def warning(self) -> str | None:
        """What is shown while the run goes on; None = rewards differ, or there are too few responses yet to say."""
        return None if self.differs or self.responses < FIRST_TOLD else self.words

    @property
    def words(self) -> str:
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
        return {"responses": self.responses, "words": self.words, "samples": [dict(s) for s in self.samples]}


@dataclass
class LostResponses:
    """Counts the responses that rewards failed on. The first is told at once, then at every tenfold number: a reward that
    fails now and then must not fill the screen, and one that fails often must not go unseen."""

    generated: int = 0
    lost: int = 0
    last: str = ""
    """Why the last of them was lost."""
    _told_at: int = 1

    def count(self, *, generated: int, lost: int, why: str) -> None:
        self.generated += generated
        if not lost:
            return
        self.lost += lost
        self.last = why[:LONGEST_WORDS] or self.last
        if self.lost >= self._told_at:
            while self._told_at <= self.lost:
                self._told_at *= 10
            words = "%d of %d responses have no reward and are not trained on, the last: %s"
            logger.warning(words, self.lost, self.generated, self.last)

    def summary(self) -> dict[str, Any] | None:
        """{"responses": 48, "share": 0.5, "last": "score failed at r.py:3: KeyError: 'a'"}; None = none was lost."""
        if not self.lost:
            return None
        return {"responses": self.lost, "share": round(self.lost / max(1, self.generated), 4), "last": self.last}


def no_signal_lines(found: Mapping[str, Any], *, max_new_tokens: int) -> list[str]:
    """What is shown at the end of a run of which nothing could be learned."""
    lines = [f"{found['words']}. Nothing could be learned. Two of them:"]
    for sample in found["samples"]:
        cut = f", cut off at generate.max_new_tokens={max_new_tokens}" if sample["cut_off"] else ""
        lines.append(
            f"  prompt {sample['prompt']!r}, response {sample['response']!r}, reward {sample['reward']:g}{cut}"
        )
    return lines
