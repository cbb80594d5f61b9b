"""What a run writes about itself stays small, however many steps it makes; its clock says how long it has taken, and how
long its steps will still take."""

import json
import pickle
from collections.abc import Iterator

import pytest

from tba.config import load_config
from tba.observe import recorder as module
from tba.observe.files import RunFolder
from tba.observe.recorder import Recorder
from tba.types import ResponseCounts


@pytest.fixture
def recorder(tmp_path) -> Iterator[Recorder]:
    config = load_config(None, ["train.max_steps=1000000", "observe.progress=false"])
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    found = Recorder(config, folder, decode=lambda group: [], reward_weights={}, counts=ResponseCounts())
    yield found
    found.close()


def lines(recorder: Recorder) -> list[dict]:
    return list(map(json.loads, recorder.folder.metrics.read_text().splitlines()))


def test_from_step_10_000_on_a_line_is_the_mean_of_ten_steps_and_later_of_a_hundred(recorder):
    for step in (*range(9_998, 10_021), *range(99_901, 100_101)):
        recorder.step(step, {"loss": float(step), "learning_rate": float(step)})
    assert [line["step"] for line in lines(recorder)] == [
        *(9_998, 9_999, 10_000, 10_010, 10_020),
        *range(99_910, 100_000, 10),
        *(100_000, 100_100),
    ]
    tenth = next(line for line in lines(recorder) if line["step"] == 10_010)
    assert (tenth["loss"], tenth["learning_rate"]) == (10_005.5, 10_010.0)


def test_a_run_that_resumes_between_two_lines_writes_those_of_one_that_was_not_interrupted(recorder):
    for step in range(10_001, 10_026):
        recorder.step(step, {"loss": float(step)})
    state = pickle.dumps(recorder.state())
    for _ in range(2):  # the second time of what the first has written is cut off
        recorder.load_state(pickle.loads(state))
        recorder.cut_files()
        for step in range(10_026, 10_041):
            recorder.step(step, {"loss": float(step)})
        assert [(line["step"], line["loss"]) for line in lines(recorder)] == [
            *((10_010, 10_005.5), (10_020, 10_015.5), (10_030, 10_025.5), (10_040, 10_035.5))
        ]


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
        recorder.training_starts()
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


@pytest.mark.parametrize(("seconds", "told"), [(30.0, True), (1.0, False)])
def test_a_run_that_is_far_from_done_is_told_once_how_long_it_takes(tmp_path, clock, capfd, seconds, told):
    recorder = make(RunFolder.create(tmp_path / "run", overwrite=False), "observe.progress=true")
    steps(recorder, clock, *[seconds] * 8)
    recorder.close()
    printed = capfd.readouterr().err
    assert printed.count("at this pace 60 steps take 30 min; the trainer is the bottleneck.") == int(told)
