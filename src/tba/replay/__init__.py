"""The replay buffer: the searchers' groups in memory and on disk, the rules that draw them, and the batches they make."""

from tba.replay.buffer import ReplayBuffer, ReplayEmpty

__all__ = ["ReplayBuffer", "ReplayEmpty"]
