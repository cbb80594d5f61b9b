"""pass@k and avg@k against numbers worked out by hand."""

import pytest

from tba.evaluate.accuracy import pass_at_k, sampled_metrics


def test_pass_at_k_by_hand():
    # 4 samples, 1 solved: a draw of 2 misses it with probability 3/4 * 2/3 = 1/2
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(4, 0, 2) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="pass@4 needs at least 4 samples"):
        pass_at_k(2, 1, 4)


def test_metrics_are_means_over_prompts_with_standard_errors_over_prompts():
    assert sampled_metrics([[True, False], [False, False], [True, True]], 2) == {
        "pass@2": pytest.approx(2 / 3),
        # (1/3)^2 + (2/3)^2 + (1/3)^2 = 2/3, over 2, over 3
        "pass@2_standard_error": pytest.approx((1 / 9) ** 0.5),
        "avg@2": pytest.approx(0.5),
        # 0, -1/2, 1/2: 1/2, over 2, over 3; over the six samples it would be sqrt(1.5 / 5 / 6) = .22
        "avg@2_standard_error": pytest.approx((1 / 12) ** 0.5),
    }


def test_one_prompt_has_no_standard_error():
    assert sampled_metrics([[True, False]], 2) == {"pass@2": 1.0, "avg@2": 0.5}
