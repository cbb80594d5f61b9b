"""Sessions: the calls that an agent makes in one episode, joined into trajectories for training.

A client starts a session and gets a key. Calls with this key belong to the session. At its end the calls are joined by
exact token prefixes: a call whose prompt begins with all tokens of a trajectory continues it, and what lies between (a
tool's or a user's words) was not chosen by the policy. Every other call begins a trajectory of its own, such as one of a
second agent, or one whose history was written anew. Each token that the policy chose is in exactly one trajectory.

Nothing here knows of HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.serve.bodies import Asked
from tba.serve.chat import Call
from tba.types import Finish, Request

KEY_PREFIX = "tba-session-"
"""Beginning of every session's key: a key of a session that has ended is refused, and not taken for no session."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """The place of a call in its trajectory: tokens `first` to `end` of the response are its own."""

    id: str
    first: int
    end: int
    reward: float | None
    """Reward of this call alone; None = it has none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeTrajectory:
    """Calls that continue each other: the first prompt, and everything after it as one response.

    Two calls, with two tokens of a tool between them:
    EpisodeTrajectory(prompt_ids=[5, 6], token_ids=[9, 2, 7, 7, 8], loss_mask=[True, True, False, False, True], ...)
    """

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray
    """True where the policy chose the token."""
    policy_log_probs: np.ndarray
    """NaN where the policy did not choose."""
    behaviour_log_probs: np.ndarray
    version_spans: tuple[tuple[int, int], ...]
    turns: tuple[Turn, ...]
    finish: Finish
    """Why its last call ended."""

    def as_json(self) -> dict[str, Any]:
        """Plain lists; null is the log-prob of a token that the policy did not choose."""
        chosen = self.loss_mask.tolist()

        def log_probs(values: np.ndarray) -> list[float | None]:
            return [value if is_chosen else None for value, is_chosen in zip(values.tolist(), chosen)]

        return {
            "prompt_ids": self.prompt_ids.tolist(),
            "token_ids": self.token_ids.tolist(),
            "loss_mask": [int(is_chosen) for is_chosen in chosen],
            "log_probs": log_probs(self.policy_log_probs),
            "behaviour_log_probs": log_probs(self.behaviour_log_probs),
            "version_spans": [list(span) for span in self.version_spans],
            "turns": [vars(turn) for turn in self.turns],
            "finish_reason": self.finish,
        }


def join_calls(calls: Iterable[Call], rewards: dict[str, float]) -> list[EpisodeTrajectory]:
    """Trajectories in the order of their first calls; `rewards` are those of single calls, by id."""
    chains: list[list[Call]] = []
    # All tokens of each chain so far, and their number: the longest that fits is continued.
    known: list[np.ndarray] = []
    for call in calls:
        whole = np.concatenate((call.prompt_ids, call.token_ids))
        fitting = [place for place, tokens in enumerate(known) if _begins_with(call.prompt_ids, tokens)]
        if fitting:
            place = max(fitting, key=lambda place: len(known[place]))
            chains[place].append(call)
            known[place] = whole
        else:
            chains.append([call])
            known.append(whole)
    return [_joined(chain, rewards) for chain in chains]


def _begins_with(tokens: np.ndarray, beginning: np.ndarray) -> bool:
    return len(beginning) <= len(tokens) and np.array_equal(tokens[: len(beginning)], beginning)


def _joined(chain: list[Call], rewards: dict[str, float]) -> EpisodeTrajectory:
    first, last = chain[0], chain[-1]
    start = len(first.prompt_ids)
    tokens = np.concatenate((last.prompt_ids, last.token_ids))[start:]
    mask = np.zeros(len(tokens), dtype=bool)
    policy, behaviour = (np.full(len(tokens), np.nan, dtype=np.float32) for _ in range(2))
    spans, turns = list[tuple[int, int]](), list[Turn]()
    for call in chain:
        begin = len(call.prompt_ids) - start
        own = slice(begin, begin + len(call.token_ids))
        mask[own], policy[own], behaviour[own] = True, call.policy_log_probs, call.behaviour_log_probs
        for place, version in call.version_spans:
            # Tokens between two calls were chosen by no version: they count to the span before them.
            if not spans or spans[-1][1] != version:
                spans.append((begin + place, version))
        turns.append(Turn(id=call.id, first=own.start, end=own.stop, reward=rewards.get(call.id)))
    return EpisodeTrajectory(
        prompt_ids=first.prompt_ids,
        token_ids=tokens,
        loss_mask=mask,
        policy_log_probs=policy,
        behaviour_log_probs=behaviour,
        version_spans=tuple(spans),
        turns=tuple(turns),
        finish=last.finish,
    )


@dataclass(kw_only=True, eq=False)
class Session:
    """An episode that goes on."""

    id: str
    task_id: str | None
    used: float = 0.0
    """Time of the last call, by the clock of `Sessions`."""
    calls: list[Call] = field(default_factory=list)
    reward: float | None = None
    call_rewards: dict[str, float] = field(default_factory=dict)

    def requests(self, asked: Asked, unique: str) -> list[Request]:
        """The engine's requests for a call of the session."""
        return asked.requests(unique)

    def set_reward(self, reward: float, call_id: str | None) -> None:
        """The reward of the episode, or of one call; a later one takes the place of an earlier one."""
        if call_id is None:
            self.reward = reward
            return
        if all(call.id != call_id for call in self.calls):
            raise KeyError(f"interaction_id={call_id!r} is no response of this session.")
        self.call_rewards[call_id] = reward

    def as_json(self) -> dict[str, Any]:
        trajectories = join_calls(self.calls, self.call_rewards)
        return {
            "session_id": self.id,
            "task_id": self.task_id,
            "reward": self.reward,
            "interaction_count": len(self.calls),
            "trajectories": [trajectory.as_json() for trajectory in trajectories],
        }


class TooManySessions(RuntimeError):
    """No more sessions are taken before others end."""


class Sessions:
    """The sessions that go on, by key. One that nobody uses is forgotten after a while."""

    def __init__(self, *, most: int, idle_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.idle_seconds, self._clock = most, idle_seconds, clock
        self._by_key: dict[str, Session] = {}

    def start(self, task_id: str | None = None) -> tuple[str, Session]:
        """A new session and its key."""
        session = Session(id=secrets.token_hex(8), task_id=task_id)
        return self.add(session), session

    def add(self, session: Session) -> str:
        """The key of a session that begins now."""
        self._forget_idle()
        if len(self._by_key) >= self.most:
            raise TooManySessions(f"{len(self._by_key)} sessions go on, of at most {self.most}: end some.")
        key, session.used = KEY_PREFIX + secrets.token_urlsafe(24), self._clock()
        self._by_key[key] = session
        return key

    def clear(self) -> None:
        """End all sessions."""
        self._by_key.clear()

    def find(self, key: str) -> Session | None:
        session = self._by_key.get(key)
        if session is not None:
            session.used = self._clock()
        return session

    def end(self, key: str) -> Session | None:
        return self._by_key.pop(key, None)

    def _forget_idle(self) -> None:
        last = self._clock() - self.idle_seconds
        self._by_key = {key: session for key, session in self._by_key.items() if session.used >= last}
