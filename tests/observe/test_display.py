"""What a finished run shows: the line on stability and the advice, from hand-made summaries; the curve in characters."""

import pytest

from tba.observe.display import (
    Curve,
    Stability,
    advice,
    shown,
    stability_line,
    table_names,
    text_plot,
    waiting_advice,
    went_badly,
)


def summary(**changes):
    whole = {
        "final": {"accuracy": 0.60},
        "final_standard_error": {"accuracy": 0.02},
        "collapse": None,
        "best": {"step": 80, "score": 0.62},
        "stability": {"drift_nats": 0.021, "held_back": 0.1, "trained_per_generated": 1.0},
    }
    return whole | changes


def test_means_are_over_the_steps_that_have_the_metric_and_the_rest_is_the_last():
    stability = Stability()
    stability.step({"off_policy/kl": 0.1, "tb/held_back": 0.2, "buffer/replay_ratio": 0.5, "learning_rate": 1e-4})
    stability.step({"buffer/replay_ratio": 0.9, "learning_rate": 2e-4})
    stability.step({"off_policy/kl": 0.3, "tb/held_back": 0.0})
    assert stability.summary() == pytest.approx(
        {"drift_nats": 0.2, "held_back": 0.1, "trained_per_generated": 0.9, "learning_rate": 2e-4}
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


def test_one_line_tells_alarms_drift_what_was_held_back_and_reuse():
    assert stability_line(summary()) == (
        "stability: no alarm; the policy moved 0.021 nats between generating and training a response; "
        "10% of the gradient was held back; each response was trained 1 times"
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
    stale = summary(stability={"held_back": 0.6, "trained_per_generated": 4.0})
    assert "max_trained_per_generated" in advice(stale, auto_rate=True, movement=0.06)
    late = summary(stability={"held_back": 0.6, "trained_per_generated": 1.0})
    assert "replay.lag=pace" in advice(late, auto_rate=True, movement=0.06)
    assert "train.learning_rate" in advice(summary(), auto_rate=False, movement=0.06)
    assert "train.movement=0.03" in advice(summary(), auto_rate=True, movement=0.06)


def test_the_text_plot_has_its_first_point_low_and_its_last_high():
    lines = text_plot(Curve("accuracy", [(0, 0.1), (50, 0.3), (100, 0.5)])).splitlines()
    assert lines[0].strip().startswith("50.0%")
    assert lines[0].endswith("*")
    assert lines[9].strip().startswith("10.0% |*")


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
