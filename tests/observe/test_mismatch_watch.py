"""A mismatch that rises beyond what it was at the first versions is told, once for each rise."""

import math

from tba.observe.watches import FIRST, LASTING, MismatchWatch

RESPONSES, CANARY = "off_policy/mismatch_kl", "searcher/0/mismatch_kl"


def watched(values: list[float], name: str = RESPONSES) -> MismatchWatch:
    watch = MismatchWatch()
    for step, value in enumerate(values, start=1):
        watch.step(step, {"loss": 1.0, name: value})
    return watch


FIRST_ONES = [2e-5 + 1e-7 * index for index in range(FIRST - 1)] + [3e-5]


def test_a_rise_is_told_once_with_both_values_and_the_limit(caplog):
    watched([*FIRST_ONES, 2.9e-4, 3.1e-4, 4e-4])
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"step {FIRST + 2}: off_policy/mismatch_kl is 0.00031 nats per token, at the first versions it was at most "
        "3e-05, the limit is 0.0003 (10 times that, at least 0.0001)"
    )


def test_it_is_told_again_when_it_has_fallen_and_rises_again(caplog):
    watched([*FIRST_ONES, 1e-3, 2e-5, 2e-3])
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"step {FIRST + 1}",
        f"step {FIRST + 3}",
    ]


def test_rounding_of_exact_engines_is_no_fault(caplog):
    """A hundred times the first versions, and still nothing."""
    watched([*[1e-12 + 1e-15 * index for index in range(FIRST)], 1e-10, 9e-7], CANARY)
    assert caplog.text == ""
    watched([*[1e-12 + 1e-15 * index for index in range(FIRST)], 1.8e-6, 1.9e-6, 2e-6], CANARY)
    assert "searcher/0/mismatch_kl is 2e-06" in caplog.text


def test_a_number_that_stands_on_the_board_counts_once_and_one_that_is_not_there_never(caplog):
    watched([math.nan, *[1e-5] * (3 * FIRST), math.nan, 1.0], CANARY)
    assert caplog.text == "", "there have been two measurements"


def test_searchers_are_judged_by_one_measure(caplog):
    """One that starts late, and wrong, has no first versions of its own."""
    watch = watched(FIRST_ONES, CANARY)
    for step, value in ((48, 0.3), (49, 0.2), (50, 0.1)):
        watch.step(step, {"searcher/7/mismatch_kl": value})
    assert "step 50: searcher/7/mismatch_kl is 0.1" in caplog.text


def test_single_versions_at_which_the_canary_is_far_off_are_no_fault(caplog):
    """As on GSM8K at 0.5B in bf16: .0014 at first, .066 at one version of 320, while real responses agreed to .0002."""
    usual = [0.0014 + 1e-6 * index for index in range(FIRST)]
    watched([*usual, 0.022, 0.036, 0.0014, 0.066, 0.0015, 0.03, 0.031], CANARY)
    assert caplog.text == ""
    watched([*usual, 0.03, 0.031, 0.032, 0.033, 0.034], CANARY)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"step {FIRST + LASTING['canary']}: searcher/0/mismatch_kl is 0.032")
