"""The named waits: each has a deadline, a name in the status, and a message."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tba.config import RuntimeConfig
from tba.runtime import channels, deadlines
from tba.runtime.channels import POLL_SECONDS, WaitedTooLong, wait_until
from tba.runtime.connection import TrainerConnection
from tba.runtime.counters import SharedCounters
from tba.runtime.deadlines import Idleness
from tba.runtime.links import ConnectionHandle
from tba.runtime.prompt_queue import PromptQueue, RolloutRequest, RolloutSource
from tba.runtime.shared_weights import SharedWeights
from tba.searcher.pace import PacedRollouts
from tba.searcher.rollouts import PromptStream
from tba.types import Prompt, TrajectoryGroup

NOBODY = {"waiter": "nobody", "awaited": "nothing", "heartbeats": dict}
PROMPTS = [Prompt(id=f"p{i}", token_ids=np.array([1], np.int32), text=str(i)) for i in range(8)]


class Recording:
    """A link that remembers what was sent; `arriving` gives what has arrived since the last look."""

    def __init__(self, arriving=list):
        self.sent = []
        self.drain = arriving

    def send(self, message) -> bool:
        self.sent.append(message)
        return True


@pytest.fixture
def counters():
    return SharedCounters.create()


@pytest.fixture
def ends_on(counters):
    """Makes a searcher's ends on a link."""
    slots = SharedWeights.create({"w": torch.zeros(1)}, torch.float32)
    handle = ConnectionHandle(counters=counters.memory.handle, weights=slots.handle(), references=None)
    counters.trainer["made"] = 1  # or every wait would be patient with its first step
    return lambda link, **config: TrainerConnection(link, handle, RuntimeConfig(**config), index=0, stock=1)


def group(number: int) -> TrajectoryGroup:
    return TrajectoryGroup(id=f"g{number}", prompt=PROMPTS[0], trajectories=())


def test_waiting_shows_on_the_board_and_is_counted():
    row = SharedCounters.create().searcher(0)
    seen = []

    def ready() -> bool:
        seen.append(row.wait)
        return len(seen) == 3

    seconds = wait_until(ready, name="pace", row=row, deadline_seconds=10.0, **NOBODY, explain=lambda: "")
    assert seen == ["none", "pace", "pace"]
    assert row.wait == "none"
    assert row["wait_seconds"] == pytest.approx(seconds)


def test_a_wait_within_a_wait_gives_the_outer_one_its_name_back():
    row = SharedCounters.create().searcher(0)
    seen = []

    def ready() -> bool:
        seen.append(row.wait)
        return len(seen) % 2 == 0

    def outer_ready() -> bool:
        wait_until(ready, name="durable_replay", row=row, deadline_seconds=10.0, **NOBODY, explain=lambda: "")
        seen.append(row.wait)
        seen.append(row.wait)
        return len(seen) > 4

    wait_until(outer_ready, name="first_fill", row=row, deadline_seconds=10.0, **NOBODY, explain=lambda: "")
    assert seen == [
        "none",
        "durable_replay",
        "none",
        "none",
        "first_fill",
        "durable_replay",
        "first_fill",
        "first_fill",
    ]
    assert row.wait == "none"


def test_a_full_channel_blocks_until_the_trainer_has_stored_a_group(ends_on, monkeypatch):
    monkeypatch.setattr("tba.runtime.connection.WINDOW", 2)
    looks = []

    def arriving():
        looks.append(len(link.sent))
        return [("stored", ("g0",))] if len(looks) == 3 else []

    link = Recording(arriving)
    connection = ends_on(link)
    for number in range(3):
        connection.send(group(number))
    assert [message.id for message in link.sent] == ["g0", "g1", "g2"]
    assert looks == [2, 2, 2]


def test_a_channel_that_stays_full_is_an_error_that_names_both_sides(ends_on, monkeypatch):
    monkeypatch.setattr("tba.runtime.connection.WINDOW", 1)
    connection = ends_on(Recording(), wait_seconds=0.02)
    connection.send(group(0))
    with pytest.raises(
        WaitedTooLong,
        match=r"has not stored 1 groups .* \(channel_full: a searcher waited for the trainer, and "
        r"nothing moved for runtime\.wait_seconds=0\.02 s; last heartbeat: the trainer none yet\)",
    ):
        connection.send(group(1))


def test_an_error_names_waiter_awaited_their_last_heartbeats_and_the_setting():
    """One searcher beats while the other has been silent since before anybody looked; a third is still loading."""
    row, beats = SharedCounters.create().searcher(0), {"searcher-0": 5.0, "searcher-1": 9.0, "searcher-2": 0.0}

    def heartbeats() -> dict[str, float]:
        beats["searcher-0"] += 1
        return dict(beats)

    with pytest.raises(WaitedTooLong) as error:
        wait_until(
            lambda: False,
            name="replay_ratio",
            row=row,
            deadline_seconds=0.1,
            waiter="the trainer",
            awaited="3 searchers",
            explain=lambda: "16 responses lack",
            heartbeats=heartbeats,
        )
    message = str(error.value)
    assert message.startswith(
        "16 responses lack (replay_ratio: the trainer waited for 3 searchers, and nothing moved for "
        "runtime.wait_seconds=0.1 s; last heartbeat: "
    )
    assert re.search(r"searcher-1 more than 0\.1 s ago", message)
    assert "searcher-2 none yet" in message
    assert "searcher-0 0.0 s ago" in message


def test_a_wait_in_which_nothing_moves_is_told_once_long_before_its_deadline(monkeypatch, caplog):
    monkeypatch.setattr(channels, "WARN_AFTER_SECONDS", 0.01)
    row, looks = SharedCounters.create().searcher(0), []

    def ready() -> bool:
        looks.append(caplog.text)
        return len([text for text in looks if text]) > 5  # five looks after it was told

    wait_until(ready, name="pace", row=row, deadline_seconds=60.0, **NOBODY, explain=lambda: "16 prompts lack")
    assert [record.getMessage() for record in caplog.records] == ["nothing has moved for 0 s: 16 prompts lack."]


def prompts() -> PromptStream:
    return PromptStream(PROMPTS, RolloutSource.of(PromptQueue(len(PROMPTS), seed=0)), samples_per_prompt=2)


def rollouts(version, *, max_lag, generated=lambda: 0, tick=lambda: None, deadline=0.02, **settings) -> PacedRollouts:
    def given(name, default):
        return settings.get(name, lambda: default)

    class TrainerCounters(dict):
        wait = property(lambda self: "first_fill" if given("trainer_waits", False)() else "none")

    class Searcher:
        index, prompts = 0, settings.get("prompts") or prompts()
        engine = property(lambda self: SimpleNamespace(version=version()))
        counts = property(lambda self: SimpleNamespace(generated=generated()))
        rewards = property(lambda self: SimpleNamespace(outstanding=given("unscored", 0)()))
        rollout_lag = property(lambda self: given("rollout_lag", 0.0)())

    class Counters:
        row = SharedCounters.create().searcher(0)
        searcher = lambda self, index: self.row  # noqa: E731
        trainer_progress = lambda self: given("progress", 0.0)()  # noqa: E731
        trainer = property(
            lambda self: TrainerCounters(most_lag=given("most_lag", math.inf)(), lost=given("lost", 0)())
        )

    config = SimpleNamespace(
        train=SimpleNamespace(prompts_per_step=2),
        steps_per_batch=1,
        keeps_pace=max_lag is not None,
        replay=SimpleNamespace(max_lag=max_lag),
        spare_lag=settings.get("spare_lag", 9),
        runtime=SimpleNamespace(wait_seconds=deadline),
    )
    return PacedRollouts(Searcher(), Counters(), tick, config, max_unscored=4)


def test_without_a_limit_every_rollout_may_start():
    stream = rollouts(lambda: 0, max_lag=None)
    assert all(next(stream) is not None for _ in range(20))


def test_at_lag_0_a_step_worth_of_rollouts_starts_per_version():
    version = [0]
    stream = rollouts(lambda: version[0], max_lag=0)
    assert next(stream) is not None
    assert next(stream) is not None
    assert next(stream) is None  # two are running
    version[0] = 1
    assert next(stream) is not None


def test_rollouts_that_brought_nothing_do_not_count_as_trained_on():
    """Two rollouts a step: with 3 of the first lost, rollout 4 belongs to the batch of step 0 and rollout 5 to that of
    step 1."""
    lost = [0]
    stream = rollouts(lambda: 0, max_lag=0, lost=lambda: lost[0])
    assert [next(stream) is not None for _ in range(3)] == [True, True, False]
    lost[0] = 3
    assert [next(stream) is not None for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("rollout_lag", "started"),
    # Two rollouts a step. Limit 1: those of the steps 0 and 1; limit 1.5: also the first of step 2.
    [(0.0, 4), (0.5, 5), (0.6, 6), (1.0, 6), (1.3, 7), (3.0, 10), (9.0, 14)],
)
def test_the_limit_follows_what_rollouts_take_up_to_the_largest_lag(rollout_lag, started):
    stream = rollouts(lambda: 0, max_lag=6, spare_lag=1, rollout_lag=lambda: rollout_lag)
    assert next(index for index in range(20) if next(stream) is None) == started


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("most_lag", "started"),
    # Two rollouts a step. None of step 1 may start on version 0; half of them; all.
    [(0.0, 2), (0.4, 3), (0.5, 3), (1.0, 4)],
)
def test_long_updates_leave_little_lag_also_while_the_trainer_waits(most_lag, started, waits):
    stream = rollouts(lambda: 0, max_lag=6, spare_lag=1, most_lag=lambda: most_lag, trainer_waits=lambda: waits)
    assert next(index for index in range(20) if next(stream) is None) == started


def test_between_two_publications_no_newer_weights_are_waited_for():
    stream = rollouts(lambda: 0, max_lag=6, spare_lag=4, most_lag=lambda: 0.0)  # a publication every fourth step
    assert next(index for index in range(20) if next(stream) is None) == 8


def test_while_the_trainer_waits_the_limit_is_a_step_more():
    waits = [False]
    stream = rollouts(lambda: 0, max_lag=6, spare_lag=1, trainer_waits=lambda: waits[0])
    assert next(index for index in range(20) if next(stream) is None) == 4
    waits[0] = True
    assert next(index for index in range(20) if next(stream) is None) == 2
    waits[0] = False
    assert next(stream) is None


def test_where_trainer_and_searcher_wait_for_long_the_limit_is_the_largest_lag(monkeypatch):
    """Another searcher may have the rollouts that both wait for. An update that takes long is no wait, and what this
    searcher has not finished itself is no reason to begin more."""
    clock, waits, running, version = [0.0], [False], [1], [0]
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    stream = rollouts(
        lambda: version[0],
        max_lag=6,
        spare_lag=1,
        trainer_waits=lambda: waits[0],
        generated=lambda: stream.started - running[0],
    )

    def most_after(seconds: float) -> int:
        clock[0] += seconds
        return stream._limit(6)

    assert [most_after(0.7) for _ in range(5)] == [1] * 5  # the trainer computes
    waits[0] = True
    assert [most_after(0.7) for _ in range(5)] == [2] * 5  # it waits for what this searcher has begun
    running[0] = 0
    assert [most_after(0.7) for _ in range(4)] == [2, 2, 6, 6]  # both wait
    version[0] = 1
    assert [most_after(0.7) for _ in range(3)] == [2, 2, 6]  # for the next batch
    waits[0] = False
    assert most_after(9.0) == 1


def test_the_number_of_a_rollout_says_which_step_it_is_for_whoever_makes_it():
    stock = RolloutSource(lambda count: None, size=4)
    stock.add([RolloutRequest(number=number, prompt=0, epoch=number) for number in (1, 3, 5)])  # for the steps 0, 1, 2
    stream = rollouts(lambda: 0, max_lag=1, prompts=PromptStream(PROMPTS, stock, samples_per_prompt=2))
    assert next(stream) is not None
    assert next(stream) is not None
    assert next(stream) is None


def test_without_a_rollout_at_hand_nothing_starts_until_one_comes():
    stock = RolloutSource(lambda count: None, size=4)
    stream = rollouts(
        lambda: 0,
        max_lag=None,
        prompts=PromptStream(PROMPTS, stock, samples_per_prompt=2),
        tick=lambda: stock.add([RolloutRequest(number=7, prompt=3, epoch=0)]),
        deadline=10.0,
    )
    request = next(stream)
    assert request is not None
    assert (request.rollout, request.prompt.id) == (7, "p3")


def test_a_deadline_does_not_count_while_the_awaited_role_works(monkeypatch):
    """Progress at every tenth look, a deadline of thirty: it never passes. The clock goes by looks: on a busy machine this
    process may rest for longer than that between two of them."""
    row, looks = SharedCounters.create().searcher(0), [0]
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: looks[0] * POLL_SECONDS))

    def ready() -> bool:
        looks[0] += 1
        return looks[0] > 100

    wait_until(
        ready,
        name="pace",
        row=row,
        deadline_seconds=30 * POLL_SECONDS,
        **NOBODY,
        explain=lambda: "",
        progress=lambda: float(looks[0] // 10),
    )
    assert looks[0] == 101


def test_idleness_starts_again_with_every_change():
    idleness = Idleness()
    assert idleness.look(1.0) == 0.0
    assert 0.0 <= idleness.look(1.0) < 10.0
    assert idleness.look(2.0) == 0.0


def test_time_in_which_nobody_looked_counts_for_a_second_at_most(monkeypatch):
    """A suspended run: an hour passes between two looks."""
    clock = iter([0.0, 0.0, 3600.0, 3600.5, 7200.0])
    monkeypatch.setattr("tba.runtime.deadlines.time.monotonic", lambda: next(clock))
    idleness = Idleness()
    assert [idleness.look(1.0) for _ in range(4)] == [0.0, 1.0, 1.5, 2.5]


def test_a_searcher_with_nothing_running_waits_for_newer_weights():
    version = [0]

    def tick() -> None:
        version[0] += 1

    stream = rollouts(lambda: version[0], max_lag=0, generated=lambda: 2, tick=tick, deadline=10.0)
    next(stream), next(stream)
    assert next(stream) is not None
    assert version[0] == 1


def test_weights_that_never_come_are_an_error():
    stream = rollouts(lambda: 0, max_lag=0, generated=lambda: 2)
    next(stream), next(stream)
    with pytest.raises(
        WaitedTooLong,
        match=r"searcher 0 has weights of version 0, waited for version 1(.|\n)*searcher 0 waited for the trainer"
        r".*runtime\.wait_seconds=0\.02 s; last heartbeat: the trainer",
    ):
        next(stream)


def test_a_slow_reward_holds_back_new_rollouts():
    assert next(rollouts(lambda: 0, max_lag=None, generated=lambda: -1, unscored=lambda: 4)) is None
