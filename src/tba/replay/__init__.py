"""The replay buffer: what searchers found, kept compactly, sampled by the mixed rule."""

from tba.replay.buffer import ReplayBuffer, ReplayEmpty
from tba.replay.importing import import_responses

__all__ = ["ReplayBuffer", "ReplayEmpty", "import_responses"]
