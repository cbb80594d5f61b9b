"""The chaos benchmark: its plan, its account of what is lost, and what it sees of a run."""

import json
import os
import subprocess
import sys
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from chaos_bench.accounting import (  # noqa: E402
    Note,
    StoredRow,
    account,
    accuracies_agree,
    in_words,
    read_notes,
    read_rows,
    searcher_recoveries,
)
from chaos_bench.inject import FLIPPED_BYTES, flip  # noqa: E402
from chaos_bench.plan import (  # noqa: E402
    FREQUENT,
    RARE,
    make_plan,
    mix,
    shortfalls,
)
from chaos_bench.target import StepWatch, Target, read_json  # noqa: E402

from tba.replay.durable import GroupStore  # noqa: E402
from tba.runtime.columns import encode  # noqa: E402
from tba.types import Prompt, TrajectoryGroup  # noqa: E402


def row(number, *, source="searcher-0.aa", arrival=None, time=0.0, checksum=7, sound=True):
    return StoredRow(
        arrival=number + 1 if arrival is None else arrival,
        source=source,
        number=number,
        searcher=int(source[9]),
        time=time,
        checksum=checksum,
        sound=sound,
    )


def notes(*numbers, source="searcher-0.aa", checksum=7):
    return [Note(id=f"{source}/{number}", checksum=checksum) for number in numbers]


def test_a_plan_depends_on_its_seed_and_length_alone():
    assert make_plan(seed=3, minutes=2) == make_plan(seed=3, minutes=2)
    assert make_plan(seed=3, minutes=2) != make_plan(seed=4, minutes=2)


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_have_what_they_must_within_their_time(seed):
    plan = make_plan(seed=seed, minutes=10)
    kinds = [fault.kind for fault in plan]
    assert shortfalls(kinds, minutes=10) == []
    assert Counter(kinds) == Counter(FREQUENT) + Counter(RARE)
    times = [fault.at for fault in plan]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 600
    rare = [fault.at for fault in plan if fault.kind in RARE]
    assert min(later - earlier for earlier, later in pairwise(rare)) >= 600 / sum(RARE.values()) / 2
    assert all((fault.seconds > 0) == (fault.kind[:4] in ("stop", "fill")) for fault in plan)


def test_a_minute_has_every_kind_of_fault():
    assert {fault.kind for fault in make_plan(seed=0, minutes=1)} == FREQUENT.keys() | RARE.keys()


def test_faults_that_were_not_done_are_told():
    kinds = ["kill_searcher"] * 14 + ["kill_trainer"] * 5 + ["stop_searcher"] * 81
    assert shortfalls(kinds, minutes=10) == ["14 kill_searcher instead of 15"]
    assert shortfalls(kinds[:99], minutes=5) == []
    assert mix(kinds) == "kill_searcher 14, stop_searcher 81, kill_trainer 5"


def test_everything_acknowledged_is_stored():
    found = account(notes(0, 1), [row(0), row(1), row(2)], {"searcher-0.aa": 2})
    assert (found.acknowledged, found.stored, found.unacknowledged) == (2, 3, 1)
    assert not found.lost + found.changed + found.twice + found.evicted


def test_an_acknowledged_group_without_a_row_is_lost():
    assert account(notes(0, 1, 2), [row(0), row(2)], {"searcher-0.aa": 2}).lost == ["searcher-0.aa/1"]
    assert account(notes(0), [], {}).lost == ["searcher-0.aa/0"]


def test_rows_that_left_in_their_turn_are_evicted_and_not_lost():
    rows = [row(2, arrival=4), row(0, source="searcher-1.bb", arrival=5), row(3, arrival=6)]
    noted = [*notes(0, 1, 2, 3), *notes(0, source="searcher-1.bb"), *notes(4, source="searcher-1.cc")]
    found = account(noted, rows, {"searcher-0.aa": 3, "searcher-1.bb": 0, "searcher-1.cc": 4})
    assert found.evicted == ["searcher-0.aa/0", "searcher-0.aa/1", "searcher-1.cc/4"]
    assert found.lost == []
    # Its number is above the highest that was ever stored, or above one that is still there.
    assert account(notes(9), rows, {"searcher-0.aa": 3}).lost == ["searcher-0.aa/9"]
    assert account(notes(2), [row(1, arrival=4), row(3, arrival=5)], {"searcher-0.aa": 3}).lost == ["searcher-0.aa/2"]


def test_no_more_rows_can_have_left_than_are_missing_at_the_front():
    found = account(notes(0, 1, 2), [row(2, arrival=2)], {"searcher-0.aa": 2})
    assert (found.lost, found.evicted) == (["searcher-0.aa/0", "searcher-0.aa/1"], [])


def test_a_row_with_other_content_is_changed_and_one_id_in_two_rows_is_stored_twice():
    assert account(notes(0, checksum=8), [row(0)], {"searcher-0.aa": 0}).changed == ["searcher-0.aa/0"]
    assert account([], [row(0, sound=False)], {"searcher-0.aa": 0}).changed == ["searcher-0.aa/0"]
    found = account(notes(0), [row(0), row(0, arrival=2)], {"searcher-0.aa": 0})
    assert (found.twice, found.lost) == (["searcher-0.aa/0"], [])


def test_notes_are_read_up_to_the_line_that_a_kill_cut_off(tmp_path):
    (tmp_path / "1.log").write_text("searcher-0.aa/0 0000000a\nsearcher-0.aa/1 ff\nsearcher-0.aa/2 0")
    (tmp_path / "2.log").write_text("")
    assert read_notes(tmp_path) == [*notes(0, checksum=10), *notes(1, checksum=255)]


def test_rows_of_a_real_durable_replay_are_sound_and_have_the_checksums_of_their_payloads(tmp_path):
    groups = [
        TrajectoryGroup(
            id=f"searcher-1.aa/{number}",
            prompt=Prompt(id="p", token_ids=np.array([5], np.int32), text="é"),
            trajectories=(),
            searcher=1,
        )
        for number in range(3)
    ]
    path = tmp_path / "replay.sqlite"
    store = GroupStore(path, durability="process", capacity=100, reward_weights={}, clock=lambda: 1.5)
    for group in groups:
        store.append(group, step=4)
    store.close()
    rows, marks = read_rows(path)
    assert rows == [
        row(number, source="searcher-1.aa", time=1.5, checksum=zlib.crc32(encode(group)))
        for number, group in enumerate(groups)
    ]
    assert marks == {"searcher-1.aa": 2}


def test_a_searcher_has_recovered_when_a_process_that_sent_nothing_before_has_sent_a_group():
    rows = [
        row(0, time=1.0),
        row(1, time=11.0),  # of the killed process, and received after its end
        row(0, source="searcher-0.bb", time=14.5),
        row(0, source="searcher-1.cc", time=12.0),
    ]
    found = searcher_recoveries([(0, 10.0), (0, 20.0)], rows)
    assert [recovery.seconds for recovery in found] == [4.5, None]
    assert in_words(found) == "2 kills, median 4.5 s, worst 4.5 s, 1 never"


def test_accuracies_agree_within_three_points_or_two_standard_errors():
    assert accuracies_agree(0.85, 0.875, count=2000) == (True, 0.03)
    assert not accuracies_agree(0.85, 0.89, count=2000)[0]
    # Two standard errors of the difference: 2 * sqrt(2 * .25 / 200) = .1
    assert accuracies_agree(0.5, 0.5, count=200) == (True, pytest.approx(0.1))


def test_steps_are_seen_once_also_after_a_resume_has_cut_the_file_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    watch = StepWatch(path)
    assert not watch.look()

    def write(*records, mode="a"):
        with path.open(mode) as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    write(*({"step": step, "loss": 0.5} for step in range(1, 8)))
    assert watch.look()
    assert not watch.look()
    write({"step": 7, "accuracy": 0.5})
    assert not watch.look()
    write(*({"step": step, "loss": 0.5} for step in range(1, 6)), mode="w")
    assert not watch.look()
    write({"step": 6, "loss": 0.5})
    assert watch.look()
    assert (watch.step, watch.made_again) == (6, 2)


def test_flipping_damages_some_bytes_and_keeps_the_size(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1000))
    flip(path, 0.5)
    damaged = path.read_bytes()
    assert len(damaged) == 1000
    assert damaged.count(0xFF) == FLIPPED_BYTES


def test_roles_are_those_of_the_status_that_are_processes_of_the_run(tmp_path):
    target = Target(tmp_path, [], acknowledged=tmp_path, log=tmp_path / "log")
    target._process = subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    try:
        child = int(target._process.stdout.readline())

        def names(status):
            (tmp_path / "status.json").write_text(json.dumps(status))
            return {name: process.pid for name, process in target.roles().items()}

        run, foreign = target.pid, os.getpid()
        roles = [{"name": "trainer", "pid": child}, {"name": "searcher-0", "pid": foreign}]
        assert names({"supervisor": run, "pid": run, "roles": roles}) == {"supervisor": run, "trainer": child}
        assert names({"supervisor": run, "pid": run, "roles": [{"name": "trainer", "pid": None}]}) == {
            "supervisor": run
        }
        # Before there is a supervisor, the run's own process trains.
        assert names({"pid": run, "roles": [{"name": "trainer"}]}) == {"supervisor": run, "trainer": run}
        assert names({"pid": foreign}) == {"supervisor": run}  # a status of the run's last life
    finally:
        target.end()
        target._process.stdout.close()
    assert target.roles() == {}
    assert read_json(tmp_path / "nothing.json") == {}
