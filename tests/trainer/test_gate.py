"""The trainer's waits before a step: what counts as waiting."""

import time

from tba.config import load_config
from tba.runtime.counters import SharedCounters
from tba.trainer.loop import Gate
from tba.types import ResponseCounts


class Fillable:
    """A buffer that can fill a batch once it is told so."""

    num_prompts = 0

    def __init__(self):
        self.full = False

    def can_fill(self, *_, **__) -> bool:
        return self.full


class BusyFeed:
    """A trainer whose every look finds groups to take in, for a while; the last of them fill the batch."""

    def __init__(self, looks: int, busy_seconds: float):
        self.replay, self.counts, self.lost = Fillable(), ResponseCounts(), set()
        self.receive_seconds = 0.0
        self._looks, self._busy_seconds = looks, busy_seconds

    def receive(self) -> None:
        started = time.perf_counter()
        while time.perf_counter() < started + self._busy_seconds:
            pass
        self._looks -= 1
        if self._looks == 0:
            self.replay.full, self.counts.generated = True, 10**6
        self.receive_seconds += time.perf_counter() - started

    def expire(self) -> None:
        pass


def gate() -> Gate:
    config = load_config(None, ["replay.max_replay_ratio=1"])
    return Gate(config, SharedCounters.create().trainer, num_train_prompts=100, asked_to_stop=lambda: False)


def test_seconds_in_which_groups_are_taken_in_are_not_waiting():
    feed, started = BusyFeed(looks=4, busy_seconds=0.02), time.perf_counter()
    waited = gate().wait(feed)
    # Counted as waiting too, the .06 s after the first look would make the sum larger than the time that has passed.
    assert waited > 0.0
    assert feed.receive_seconds >= 0.08
    assert waited + feed.receive_seconds <= time.perf_counter() - started


def test_who_looks_sees_how_many_prompts_of_the_batch_are_there():
    waiting, feed = gate(), BusyFeed(looks=3, busy_seconds=0.0)
    feed.replay.num_prompts = 3
    waiting.wait(feed)
    assert (waiting.row["batch_prompts"], waiting.row["prompts_wanted"]) == (3, waiting.config.train.prompts_per_step)


def test_a_batch_that_is_full_at_the_first_look_was_not_waited_for():
    assert gate().wait(BusyFeed(looks=1, busy_seconds=0.0)) == 0.0
