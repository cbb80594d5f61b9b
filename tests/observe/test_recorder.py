"""What a run writes about itself stays small, however many steps it makes; its clock says how long it has taken, and how
long its steps will still take."""

import io
import json
import pickle
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tba.config import load_config
from tba.observe import recorder as module
from tba.observe.recorder import Recorder, TrainingClock
from tba.observe.run_folder import RunFolder
from tba.types import Completion, Prompt, ResponseCounts, Trajectory, TrajectoryGroup


@pytest.fixture
def recorder(tmp_path) -> Iterator[Recorder]:
    config = load_config(None, ["train.max_steps=1000000", "observe.progress=false"])
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    found = Recorder(config, folder, decode=lambda group: [], reward_weights={}, counts=ResponseCounts())
    yield found
    found.close()


def lines(recorder: Recorder) -> list[dict]:
    return list(map(json.loads, recorder.folder.metrics.read_text().splitlines()))


def test_the_state_does_not_grow_with_the_steps(recorder, monkeypatch):
    monkeypatch.setattr(module, "KEPT_TIMES", 100)
    sizes = []
    for step in range(1, 1001):
        recorder.step(step, {"loss": 0.5})
        if step in (500, 1000):
            sizes.append(len(pickle.dumps(recorder.state())))
    assert sizes[1] < sizes[0] + 200, "numbers of more digits alone"
    recorder.evaluation(950, {"accuracy": 0.5})
    found = lines(recorder)
    assert found[-1]["seconds"] == next(line["seconds"] for line in found if line["step"] == 950)


@pytest.fixture
def clock(monkeypatch):
    """The time, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def make(folder, *settings: str) -> Recorder:
    config = load_config(None, ["train.max_steps=60", "observe.progress=false", *settings])
    return Recorder(config, folder, decode=lambda group: [], reward_weights={}, counts=ResponseCounts())


def steps(recorder: Recorder, clock, *seconds: float) -> None:
    for own in seconds:
        recorder.clock.start()
        clock[0] += own
        recorder.step(recorder.steps + 1, {"reward": 0.5})


def test_the_time_left_is_by_the_pace_of_the_later_half_of_the_steps(tmp_path, clock):
    recorder = make(RunFolder.create(tmp_path / "run", overwrite=False))
    clock[0] += 30.0  # the model loads
    steps(recorder, clock, 50.0)
    assert recorder.seconds_left is None, "one step has no pace yet"
    steps(recorder, clock, 6.0, 4.0, 2.0)
    # of steps 3 and 4: 3 s a step, 56 to come
    assert recorder.seconds_left == pytest.approx(168.0)
    clock[0] += 2.0
    assert recorder.seconds_left == pytest.approx(166.0)
    clock[0] += 20.0  # a step that takes longer than it should
    assert recorder.seconds_left == pytest.approx(165.0)
    assert (recorder.seconds, recorder.elapsed) == (62.0, 114.0)

    later = make(RunFolder(tmp_path / "run"))
    clock[0] += 1000.0  # nobody trains
    later.began = clock[0]
    later.load_state(recorder.state() | {"elapsed": 114.0})
    assert (later.seconds, later.elapsed) == (62.0, 114.0)
    assert later.seconds_left == pytest.approx(168.0)
    for each in (recorder, later):
        each.close()


def test_the_pace_of_a_long_run_is_known_without_a_look_at_every_step(recorder):
    class Times(dict):
        def __iter__(self):
            raise AssertionError("looks at all steps")

    recorder._seconds_at = Times({step: 2.0 * step for step in range(20_001, 30_001)})
    recorder.steps, recorder.seconds = 30_000, 60_000.0
    assert recorder.pace == 2.0
    recorder.clock.start()
    recorder.step(30_001, {"loss": 0.5})
    assert len(recorder._seconds_at) == module.KEPT_TIMES


@pytest.mark.parametrize(("seconds", "told"), [(30.0, True), (1.0, False)])
def test_a_run_that_is_far_from_done_is_told_once_how_long_it_takes(tmp_path, clock, capfd, seconds, told):
    recorder = make(RunFolder.create(tmp_path / "run", overwrite=False), "observe.progress=true")
    steps(recorder, clock, *[seconds] * 8)
    recorder.close()
    printed = capfd.readouterr().err
    assert printed.count("at this pace 60 steps take 30 min; the trainer is the bottleneck.") == int(told)


class Terminal(io.StringIO):
    """What the panel is drawn on."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("times", "message"),
    [
        # From step 2 on the trainer waited for 25 of every 30 s: 83%.
        (
            {"time/wait_for_batch": 25.0, "time/step": 5.0},
            "generating is the bottleneck, the trainer waits 83% of its time",
        ),
        ({"time/wait_for_batch": 5.0, "time/step": 20.0, "time/second_update": 5.0}, "the trainer is the bottleneck."),
    ],
)
@pytest.mark.parametrize("has_panel", [True, False])
def test_what_takes_the_time_is_decided_from_measured_waits_and_shown_above_the_panel_too(
    tmp_path, clock, monkeypatch, has_panel, times, message
):
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal() if has_panel else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    recorder = make(RunFolder.create(tmp_path / "run", overwrite=False), "observe.progress=true")
    assert (recorder._progress._live is not None) == has_panel
    for step in range(1, 9):
        recorder.clock.start()
        clock[0] += 30.0
        recorder.step(step, {"reward": 0.5, **times})
    recorder.close()
    assert screen.getvalue().count(f"at this pace 60 steps take 30 min; {message}") == 1


def rewarded(rollout: int, *rewards: float) -> TrajectoryGroup:
    """Responses of one token to a prompt of their own."""
    one = np.zeros(1, np.float32)
    given = {"token_ids": np.array([5], np.int32), "behaviour_log_probs": one, "policy_log_probs": one}
    completions = [
        Completion(prompt_id=f"p{rollout}", sample_index=i, version_spans=((0, 0),), finish="stop", **given)
        for i in range(len(rewards))
    ]
    trajectories = [
        Trajectory(completion=c, rewards={"r": reward}, log_ref=one, reference_version=0, loss_mask=one > -1)
        for c, reward in zip(completions, rewards)
    ]
    prompt = Prompt(id=f"p{rollout}", text="about", token_ids=np.array([3], np.int32))
    return TrajectoryGroup(id=f"g{rollout}", prompt=prompt, trajectories=trajectories)


def test_while_a_run_goes_on_it_says_that_nothing_was_rewarded_until_rewards_differ(tmp_path):
    config = load_config(None, ["train.max_steps=60", "observe.progress=false"])
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    weights, counts = {"r": 1.0}, ResponseCounts()
    recorder = Recorder(config, folder, decode=lambda group: [""] * 16, reward_weights=weights, counts=counts)
    found = []
    for rollout in range(1, 6):
        recorder.group_received(0, rewarded(rollout, *[0.0] * 15, float(rollout == 5)))
        recorder.step(rollout, {"reward": 0.0})
        found.append(dict(recorder._progress._rows()).get("warning"))
    message = "so far no response was rewarded: 64 responses, all 0.0"
    assert found == [None, None, None, message, None], "of the first few it cannot be said"
    recorder.close()


def test_the_training_clock_stands_still_while_it_is_paused_and_never_goes_back(clock):
    now, clock = clock, TrainingClock()
    with clock.paused():  # the start model is evaluated
        now[0] += 50.0
    now[0] += 5.0
    assert clock.seconds == 0.0
    clock.start()
    now[0] += 7.0
    clock.start()  # it runs already
    with clock.paused():
        now[0] += 20.0
    now[0] += 3.0
    assert clock.seconds == 10.0
    clock.go_on_from(4.0)  # a run that goes back to a checkpoint has used its ten seconds all the same
    assert clock.seconds == 10.0
    later = TrainingClock()
    later.go_on_from(10.0)
    now[0] += 1000.0  # the model loads
    assert later.seconds == 10.0
    later.start()
    now[0] += 2.0
    assert later.seconds == 12.0


def test_a_run_by_seconds_is_over_when_they_are_used_and_goes_on_with_the_rest_after_a_resume(tmp_path, clock):
    by_time = ("train.max_steps=null", "train.max_seconds=40")
    recorder = make(RunFolder.create(tmp_path / "run", overwrite=False), *by_time)
    assert recorder.seconds_left == 40.0, "known before the first step"
    recorder.clock.start()
    clock[0] += 50.0
    assert not recorder.is_time_over, "there is time for one step"
    recorder = make(RunFolder(tmp_path / "run"), *by_time)
    steps(recorder, clock, 10.0, 6.0)
    assert (recorder.seconds, recorder.progress, recorder.passed_tenth) == (16.0, 0.4, True)
    clock[0] += 4.0
    assert recorder.seconds_left == pytest.approx(20.0)

    later = make(RunFolder(tmp_path / "run"), *by_time)
    later.load_state(recorder.state())
    assert (later.progress, later.seconds_left, later.pace) == (0.4, 24.0, 6.0)
    later.clock.start()
    clock[0] += 23.0
    assert not later.is_time_over
    clock[0] += 1.5  # it waits for a batch
    assert later.is_time_over
    later.time_is_over()
    assert (later.seconds, later.progress, later.summary()["steps"]) == (40.5, 1.0, 2)
    assert later.lacks_evaluation(2), "of the last step"
    for each in (recorder, later):
        each.close()


def test_a_run_by_seconds_is_told_how_many_steps_it_will_make(tmp_path, clock, capfd):
    settings = ("observe.progress=true", "train.max_steps=null", "train.max_seconds=1800")
    recorder = make(RunFolder.create(tmp_path / "run", overwrite=False), *settings)
    steps(recorder, clock, *[43.0] * 8)  # 172 s after four steps, 1628 left: 37.9 more
    recorder.close()
    assert capfd.readouterr().err.count("at this pace 42 steps take 30 min; the trainer is the bottleneck.") == 1
