"""What a run shows: its table and lines; at its end the line on stability and the advice, from hand-made summaries; the
curve in characters and as a picture."""

import io
import re

import pytest
from matplotlib.axes import Axes
from problem import wait_for
from rich.console import Console

from tba.config import load_config
from tba.observe import display
from tba.observe.display import (
    Curve,
    Progress,
    RoleStatus,
    Stability,
    advice,
    duration,
    pace_message,
    save_plot,
    shown,
    stability_line,
    table_names,
    waiting_advice,
    went_badly,
)


def summary(**changes):
    whole = {
        "final": {"accuracy": 0.60},
        "final_standard_error": {"accuracy": 0.02},
        "collapse": None,
        "best": {"step": 80, "score": 0.62},
        "stability": {"drift_nats": 0.021, "masked_fraction": 0.1, "trained_per_generated": 1.0},
    }
    return whole | changes


def test_means_are_over_the_steps_that_have_the_metric_and_the_rest_is_the_last():
    stability = Stability()
    stability.step({"off_policy/kl": 0.1, "tb/masked_fraction": 0.2, "buffer/replay_ratio": 0.5, "learning_rate": 1e-4})
    stability.step({"buffer/replay_ratio": 0.9, "learning_rate": 2e-4})
    stability.step({"off_policy/kl": 0.3, "tb/masked_fraction": 0.0})
    assert stability.summary() == pytest.approx(
        {"drift_nats": 0.2, "masked_fraction": 0.1, "trained_per_generated": 0.9, "learning_rate": 2e-4}
    )


def test_the_share_of_waiting_leaves_out_the_first_step_which_waits_for_the_start():
    stability = Stability()
    for waited, worked in ((30.0, 1.0), (1.0, 1.0), (0.0, 2.0)):
        stability.step({"time/wait_for_batch": waited, "time/step": worked})
    assert stability.summary() == {"waited": 0.25}
    stability.step(
        {"time/wait_for_batch": 0.0, "time/step": 3.0, "time/receive": 1.0}
    )  # taking in groups is work: 1 / 8
    assert stability.summary() == {"waited": 0.125}
    assert "the trainer waited 12% of its time" in stability_line(summary(stability=stability.summary()))


@pytest.mark.parametrize(
    ("stability", "told"),
    [
        ({"waited": 0.4, "trained_per_generated": 1.0}, True),
        ({"waited": 0.2, "trained_per_generated": 1.0}, False),
        ({"waited": 0.4, "trained_per_generated": 2.0}, False),  # it does so already
        ({}, False),
    ],
)
def test_a_trainer_with_time_to_spare_is_told_what_to_do_with_it(stability, told):
    assert (waiting_advice(summary(stability=stability)) is not None) is told


def test_one_line_tells_alarms_drift_what_was_masked_and_reuse():
    assert stability_line(summary()) == (
        "stability: no alarm; the policy moved 0.021 nats between generating and training a response; "
        "10% of the gradient was masked; each response was trained 1 times"
    )
    recovered = summary(collapse={"step": 40, "recovered": 60}, stability={})
    assert stability_line(recovered) == "stability: collapse alarm at step 40, recovered by step 60"


def test_a_run_went_badly_where_it_collapsed_or_ended_clearly_below_its_best():
    assert not went_badly(summary())  # one standard error below
    assert went_badly(summary(best={"step": 80, "score": 0.65}))  # two and a half
    assert went_badly(summary(collapse={"step": 40, "recovered": None}))
    assert not went_badly(summary(collapse={"step": 40, "recovered": 60}))
    assert not went_badly(summary(best=None))


def test_the_first_thing_to_change_follows_from_what_was_seen():
    stale = summary(stability={"masked_fraction": 0.6, "trained_per_generated": 4.0})
    assert "max_replay_ratio" in advice(stale, auto_rate=True, target_drift=0.18)
    late = summary(stability={"masked_fraction": 0.6, "trained_per_generated": 1.0})
    assert "replay.max_lag=1" in advice(late, auto_rate=True, target_drift=0.18)
    assert "train.learning_rate" in advice(summary(), auto_rate=False, target_drift=0.18)
    assert "train.target_drift=0.09" in advice(summary(), auto_rate=True, target_drift=0.18)


def test_shares_are_shown_in_percent_and_the_rest_as_numbers():
    assert shown("win_rate_greedy", 0.625) == "62.5%"
    assert shown("pass@8", 0.5) == "50.0%"
    assert shown("kl", 3.14159) == "3.14"


def test_the_line_on_stability_tells_of_rollbacks():
    back = {"step": 31, "to": 20}
    assert stability_line(summary(rollbacks=[back], stability={})) == (
        "stability: collapse alarm at step 31, rolled back to step 20"
    )
    again = summary(rollbacks=[back], collapse={"step": 44, "recovered": None}, stability={})
    assert stability_line(again) == (
        "stability: collapse alarm at step 31, rolled back to step 20; collapse alarm at step 44"
    )
    assert not went_badly(summary(rollbacks=[back]))


def test_a_share_that_is_an_accuracy_is_shown_once():
    binary = {"reward": 0.5, "accuracy": 0.5, "solved": 0.5}
    assert table_names(binary, binary) == ["reward", "accuracy"]
    dense = {"reward": 0.5, "solved": 0.1}
    assert table_names(binary, dense) == table_names(dense, binary) == ["reward", "solved"]
    assert table_names({"accuracy": 0.1}, {"accuracy": 0.2}) == ["accuracy"]


@pytest.mark.parametrize(
    ("seconds", "message"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (2580, "43 min"), (7830, "2 h 10 min")],
)
def test_durations_are_as_a_person_says_them(seconds, message):
    assert duration(seconds) == message


@pytest.mark.parametrize(
    ("settings", "waited", "message"),
    [
        ([], 0.1, "60 steps take 43 min; the trainer is the bottleneck."),
        ([], 0.6, "60 steps take 43 min; generating is the bottleneck, the trainer waits 60% of its time."),
        (["mode=sync"], 0.0, "60 steps take 43 min; searching and training take turns."),
    ],
)
def test_a_run_that_is_far_from_done_is_told_how_long_it_takes_and_what_takes_the_time(settings, waited, message):
    config = load_config(None, ["train.max_steps=60", *settings])
    assert f"at this pace {message}" in pace_message(config, steps=60, seconds=2580.0, waited=waited)


def shown_by(progress: Progress) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(progress._table())
    return console.file.getvalue()


def test_the_table_shows_what_is_done_before_the_first_step_and_no_numbers_that_nobody_measured():
    doing = RoleStatus(
        name="searcher-0",
        doing="evaluates the start model: 40 of 100 responses",
        waited_share=0.0,
        responses_per_second=0,
    )
    clock = [21.0, None]
    progress = Progress(
        load_config(None, ["train.max_steps=60", "observe.progress=false"]), lambda: [doing], lambda: clock
    )
    before = shown_by(progress)
    assert "step 0 of 60, 21 s elapsed " in before
    assert "evaluates the start model: 40 of 100 responses" in before
    assert not re.search(r"reward|KL|lag|evaluation |0\.0|0%|nan", before)
    clock[:] = [95.0, 600.0]
    progress.evaluation(0, {"reward": 0.25, "reward_standard_error": 0.1})
    progress.step(3, {"reward": 0.5, "kl": 0.125, "off_policy/lag_mean": 1.0, "perf/responses_per_second": 2.0})
    after = shown_by(progress)
    assert "step 3 of 60, 1 min 35 s elapsed, about 10 min left " in after
    assert "reward  0.25 (step 0)" in after
    assert "length" not in after, "it was not measured"
    progress.stopping = True
    assert "1 min 35 s elapsed, stops after this step " in shown_by(progress)
    progress.close()


def test_lines_where_there_is_no_terminal_have_the_time_and_what_is_done(capsys, monkeypatch):
    monkeypatch.setattr(display, "LINE_SECONDS", 0.001)
    waits = "waits for the first batch: 13 of 16 prompts"
    doing = RoleStatus(name="trainer", doing=waits, waited_share=1.0, responses_per_second=0)
    config = load_config(None, ["name=named", "train.max_steps=60", "observe.progress=false"])
    progress = Progress(config, lambda: [doing], lambda: (20.0, 61.0))
    printed = ""

    def comes(message: str) -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return message in printed

    assert wait_for(lambda: comes(f"named: step 0 of 60, 20 s elapsed, about 1 min 01 s left; trainer {waits}\n"))
    progress.step(3, {"reward": 0.5, "perf/responses_per_second": 2.0})
    assert wait_for(
        lambda: comes("step 3 of 60, 20 s elapsed, about 1 min 01 s left; reward 0.500; trained 2 responses/s")
    )
    progress.close()


def test_the_picture_of_a_curve_has_its_standard_errors(monkeypatch, tmp_path):
    drawn = {}
    real = Axes.errorbar
    monkeypatch.setattr(
        Axes, "errorbar", lambda self, *given, **named: drawn.update(named) or real(self, *given, **named)
    )
    save_plot(Curve("reward", [(0, 0.25), (4, 0.5)], [0.1, 0.2]), tmp_path / "evaluations.png", title="a run")
    assert drawn["yerr"] == [0.1, 0.2]
    assert (tmp_path / "evaluations.png").read_bytes().startswith(b"\x89PNG")
