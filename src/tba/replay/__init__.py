"""The replay buffer: what searchers found, kept compactly, sampled by the mixed rule."""

from tba.replay.buffer import ReplayBuffer, ReplayEmpty

__all__ = ["ReplayBuffer", "ReplayEmpty"]
