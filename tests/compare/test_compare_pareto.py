"""Two metrics that pull against each other."""

from studies import plan_study, write_run

from tba.compare.display import final_grid, tables_of
from tba.compare.plot import frontier, save_pareto
from tba.compare.results import gather
from tba.compare.study import Pareto


def test_the_frontier_holds_what_no_other_beats_in_both():
    points = [(1.0, 5.0), (2.0, 4.0), (3.0, 7.0), (3.0, 6.0), (4.0, 7.0)]
    # less x is better: (2, 4) loses to (1, 5), (3, 6) and (4, 7) to (3, 7)
    assert frontier(points, less_x=True) == [(1.0, 5.0), (3.0, 7.0)]
    # more x is better: (4, 7) beats all
    assert frontier(points, less_x=False) == [(4.0, 7.0)]
    assert frontier([(1.0, 9.0), (2.0, 8.0), (3.0, 8.5)], less_x=False) == [(1.0, 9.0), (3.0, 8.5)]
    assert frontier([], less_x=True) == []


def test_further_metrics_have_tables_and_a_picture(tmp_path):
    plan = plan_study(tmp_path, also=["cost"], pareto={"x": "cost", "y": "accuracy"}, tune=None)
    cells = [cell for cells in plan.runs.values() for cell in cells]
    for number, cell in enumerate(cells):
        write_run(cell, accuracy=0.5 + 0.01 * number, cost=float(number))
    results = gather(plan)
    first = results.cells[cells[0].row, cells[0].column]
    seeds = [number for number, cell in enumerate(cells) if (cell.row, cell.column) == (cells[0].row, cells[0].column)]
    assert first.final("cost").mean == sum(seeds) / len(seeds)
    assert final_grid(results, "cost")[1][1].startswith(f"{sum(seeds) / len(seeds):.4g}")
    save_pareto(results, Pareto(x="cost", y="accuracy"), tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").read_bytes()[:4] == b"\x89PNG"


def test_the_title_of_a_metric_that_no_run_knows_says_what_there_is(tmp_path):
    plan = plan_study(tmp_path, also=["cost", "csot"], tune=None)
    titles = [title for title, _ in tables_of(gather(plan), measures=False)]
    assert titles[1:3] == ["cost", "csot"]  # nothing is known before the first run
    write_run(next(cell for cells in plan.runs.values() for cell in cells), accuracy=0.5, cost=1.0)
    titles = [title for title, _ in tables_of(gather(plan), measures=False)]
    assert titles[1:3] == ["cost", "csot: not in `final` of any run (there are accuracy, cost)"]
