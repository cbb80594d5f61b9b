"""Small groups and buffers, and a slow, obvious buffer to compare with."""

from __future__ import annotations

import numpy as np

from tba.config import ReplayConfig
from tba.replay import ReplayBuffer
from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup


def prompt(name="a"):
    return Prompt(id=name, token_ids=np.array([1, 2 + sum(name.encode())], np.int32), text=f"text of {name}")


def trajectory(tokens, reward=0.0, *, version=0, reference=0, finish="stop", mask=None, rewards=None, index=0):
    """Log-probs are made from the tokens, so that a mix-up shows."""
    ids = np.array(tokens, np.int32)
    completion = Completion(
        prompt_id="",
        sample_index=index,
        token_ids=ids,
        behaviour_log_probs=-(ids + 0.25).astype(np.float32),
        policy_log_probs=-(ids + 0.5).astype(np.float32),
        version_spans=((0, version),),
        finish=finish,
    )
    return Trajectory(
        completion=completion,
        rewards={"r": reward} if rewards is None else rewards,
        log_ref=-(ids + 0.75).astype(np.float32),
        reference_version=reference,
        loss_mask=np.ones(len(ids), np.bool_) if mask is None else np.array(mask, np.bool_),
    )


class Groups:
    """Makes groups with ids of their own: Groups()("a", [[5, 6], [7]], rewards=[1, 0])."""

    def __init__(self):
        self.count = 0

    def __call__(self, name, responses, rewards=None, **options):
        self.count += 1
        rewards = [0.0] * len(responses) if rewards is None else rewards
        members = [trajectory(tokens, reward, **options) for tokens, reward in zip(responses, rewards)]
        return TrajectoryGroup(id=f"test.0/{self.count}", prompt=prompt(name), trajectories=tuple(members))


def replay(
    *,
    fresh_steps=1,
    seed=0,
    reward_names=("r",),
    reward_weights=(1.0,),
    deduplicate=True,
    max_uses=None,
    max_waiting_groups=None,
    **settings,
):
    return ReplayBuffer(
        ReplayConfig(deduplicate=deduplicate, **settings),
        fresh_steps=fresh_steps,
        seed=seed,
        reward_names=reward_names,
        reward_weights=reward_weights,
        uses_per_group=max_uses,
        max_waiting_groups=max_waiting_groups,
    )


def responses(batch):
    """[P][K] tuples of token ids."""
    P, K = batch.shape
    tokens = [tuple(batch.token_ids_N[a:b].tolist()) for a, b in zip(batch.offsets[:-1], batch.offsets[1:])]
    return [tokens[p * K : (p + 1) * K] for p in range(P)]


def contents(buffer):
    """Everything stored, oldest first: (prompt, reference version, tokens, reward)."""
    state = buffer.state()
    if not state["entries"]:
        return []
    owners = [(prompt_id, reference) for _, prompt_id, reference, _, count, _ in state["entries"] for _ in range(count)]
    ends = np.cumsum(state["lengths"])
    tokens = np.frombuffer(state["ids"], np.int32)
    stored = [
        (*owner, tuple(tokens[end - length : end].tolist()), float(score))
        for owner, length, end, score in zip(owners, state["lengths"], ends, state["columns"]["score"], strict=True)
    ]
    return [stored[i] for i in np.argsort(state["columns"]["arrival"])]


class SlowReplay:
    """The rules in one list: copies go, the new is appended, the oldest beyond a capacity go."""

    def __init__(self, *, capacity, capacity_per_prompt, deduplicate):
        self.capacity, self.capacity_per_prompt, self.deduplicate = capacity, capacity_per_prompt, deduplicate
        self.rows = []
        """(prompt, reference version, tokens, reward, number of the group, step received), oldest first."""
        self.ids = set()

    def add(self, group, step=0):
        if group.id in self.ids:
            return
        self.ids.add(group.id)
        fresh = []
        for member in group.trajectories:
            key = (group.prompt.id, member.reference_version, tuple(member.completion.token_ids.tolist()))
            if self.deduplicate:
                fresh = [row for row in fresh if row[:3] != key]
                self.rows = [row for row in self.rows if row[:3] != key]
            fresh.append((*key, member.rewards["r"], len(self.ids), step))
        self.rows += fresh
        if fresh:
            self._trim(fresh[0][:2])

    def _trim(self, entry):
        while sum(row[:2] == entry for row in self.rows) > self.capacity_per_prompt:
            self.rows.remove(next(row for row in self.rows if row[:2] == entry))
        self.rows = self.rows[-self.capacity :]

    def fresh(self, reference, *, step, fresh_steps, P):
        """The rows of the groups of the last steps, and of the newest groups until P prompts, or all there are, are in."""
        rows = [row for row in self.rows if row[1] == reference]
        P = min(P, len({row[0] for row in rows}))
        for first_group in sorted({row[4] for row in rows}, reverse=True):
            fresh = [row for row in rows if row[4] >= first_group or step - row[5] < fresh_steps]
            if len({row[0] for row in fresh}) >= P:
                return fresh
        return rows

    def drop_reference(self, version_below):
        self.rows = [row for row in self.rows if row[1] >= version_below]
