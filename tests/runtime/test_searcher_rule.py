"""The fewest searchers that keep the trainer fed: when one joins, when one leaves, and that it comes to rest."""

from tba.runtime.searcher_rule import REMEMBERED_WINDOWS, SearcherRule, Waits


def simulated(rule: SearcherRule, *, count: int, needed: float, windows: int) -> list[int]:
    """Numbers of searchers of a run whose trainer uses what `needed` of them make, window by window. A trainer with fewer
    waits for the missing share of its time; searchers beyond it wait for the rest of theirs."""
    now, trainer, waited, seen = 0.0, 0.0, [0.0] * count, []
    for _ in range(windows):
        for _ in range(31):
            change = rule.look(now, Waits(trainer=trainer, searchers=tuple(waited), all_at_work=True))
            if change is not None:
                waited = (waited + [0.0] * change)[:change]
            now += 1.0
            trainer += max(0.0, 1.0 - len(waited) / needed)
            waited = [each + max(0.0, 1.0 - needed / len(waited)) for each in waited]
        seen.append(len(waited))
    return seen


def test_a_starved_trainer_gets_searchers_until_it_is_fed():
    assert simulated(SearcherRule(least=1, most=8), count=1, needed=3.0, windows=6) == [2, 3, 3, 3, 3, 3]


def test_there_are_never_more_than_allowed():
    assert simulated(SearcherRule(least=1, most=2), count=1, needed=5.0, windows=4) == [2, 2, 2, 2]


def test_searchers_that_mostly_wait_leave_one_by_one():
    assert simulated(SearcherRule(least=1, most=8), count=5, needed=1.5, windows=6) == [4, 3, 2, 2, 2, 2]


def test_a_number_that_starved_the_trainer_is_not_tried_again_at_once():
    """With a need that falls to 1.4, three are 1.6 too many, but two were too few when 2.4 were needed."""
    rule = SearcherRule(least=1, most=8)
    assert simulated(rule, count=2, needed=2.4, windows=3) == [3, 3, 3]
    later = simulated(rule, count=3, needed=1.4, windows=REMEMBERED_WINDOWS + 3)
    assert set(later[:10]) == {3}
    assert later[-1] == 2


def test_nothing_is_decided_while_a_searcher_loads_its_model():
    rule = SearcherRule(least=1, most=8)
    for second in range(100):
        assert rule.look(second, Waits(trainer=float(second), searchers=(0.0,), all_at_work=second % 20 != 0)) is None
