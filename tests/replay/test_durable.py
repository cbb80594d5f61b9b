"""The durable replay: what is committed is there after kill -9, once, bit for bit."""

import dataclasses
import json
import os
import pickle
import sqlite3
import textwrap
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from commands import run_python

from tba.replay import durable
from tba.replay.database import DurableReplayError, find_database, load_groups, network_filesystem, place_database
from tba.replay.durable import GroupStore
from tba.runtime.columns import ResponseColumns, acknowledged_log, decode, encode, pack_responses
from tba.types import Completion, HighWaterMarks, Prompt, Trajectory, TrajectoryGroup

NAN = np.array([0x7FC12345], np.uint32).view(np.float32)[0]
"""A NaN with bits of its own."""


def trajectory(tokens=(5, 6, 7), *, rewards=None, values=False, version=3):
    ids = np.array(tokens, np.int32)
    completion = Completion(
        prompt_id="p",
        sample_index=17,
        token_ids=ids,
        behaviour_log_probs=np.array([NAN, *(-0.1 * ids[1:])], np.float32),
        policy_log_probs=(-0.3 * ids).astype(np.float32),
        version_spans=((0, version + 1), (2, version)),
        finish="length",
        num_prefix_tokens=1,
    )
    return Trajectory(
        completion=completion,
        rewards={"right": 0.1, "short": float("nan")} if rewards is None else rewards,
        log_ref=np.array([-0.0, *(-0.7 * ids[1:])], np.float32),
        reference_version=2,
        loss_mask=ids % 2 == 1,
        step_values=np.array([0.5, *[NAN] * (len(ids) - 1)], np.float32) if values else None,
    )


def group(number=0, *, sender="searcher-3.aa", responses=2, **options):
    prompt = Prompt(
        id="p", token_ids=np.array([1, 2], np.int32), text="2+2=", columns={"answer": "4", "weights": [1, None]}
    )
    return TrajectoryGroup(
        id=f"{sender}/{number}",
        prompt=prompt,
        trajectories=tuple(trajectory(**options) for _ in range(responses)),
        num_lost=1,
        rollout=17,
        searcher=3,
    )


def make_store(path, *, capacity=1000, durability="process", **settings):
    weights = {"right": 2.0, "short": 1.0}
    return GroupStore(path, durability=durability, capacity=capacity, reward_weights=weights, **settings)


def ids_in(path):
    return [stored.group.id for stored in load_groups(path)]


def parts(value):
    """Everything in a record, arrays as their type and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, ResponseColumns):
        return [parts(response) for response in value]
    if dataclasses.is_dataclass(value):
        return {item.name: parts(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return [(key, parts(inner)) for key, inner in value.items()]
    return [parts(inner) for inner in value] if isinstance(value, tuple | list) else value


ODD_GROUPS = {
    "prefixes, NaN and two versions": group(),
    "step values of some": dataclasses.replace(
        group(), trajectories=(trajectory(values=True), trajectory((9,)), trajectory((1, 2), values=True))
    ),
    "other components in each": dataclasses.replace(
        group(), trajectories=(trajectory(rewards={"b": -0.0, "a": 1e300}), trajectory(rewards={}))
    ),
    "lost": dataclasses.replace(group(), trajectories=(), num_lost=8),
    "chat and odd text": dataclasses.replace(
        group(),
        prompt=Prompt(
            id="é\ud800\x00",
            token_ids=np.array([7], np.int32),
            text=[{"role": "user", "content": "\u2028 \ud800"}],
            columns={"x": {"y": [1.5, True, "z"]}, "inf": float("inf")},
        ),
    ),
}


def test_a_note_of_an_acknowledged_group_matches_its_row(tmp_path, monkeypatch):
    assert acknowledged_log() is None
    monkeypatch.setenv("TBA_ACKNOWLEDGED_LOG", str(tmp_path))
    note = acknowledged_log()
    store = make_store(tmp_path / "r.sqlite")
    for number in range(2):
        store.append(group(number), step=0)
        note(group(number))
    store.close()
    with sqlite3.connect(tmp_path / "r.sqlite") as database:
        rows = database.execute("SELECT incarnation, number, payload FROM groups").fetchall()
    noted = (tmp_path / f"{os.getpid()}.log").read_text()
    assert noted == "".join(f"{source}/{number} {zlib.crc32(payload):08x}\n" for source, number, payload in rows)


@pytest.mark.parametrize("made", ODD_GROUPS.values(), ids=ODD_GROUPS)
def test_every_field_of_a_group_comes_back_bit_for_bit(made, tmp_path):
    assert parts(decode(encode(made))) == parts(made)
    packed = dataclasses.replace(made, trajectories=pack_responses(made.trajectories, made.id))
    assert parts(packed) == parts(made)
    assert parts(pickle.loads(pickle.dumps(packed))) == parts(made)
    assert encode(packed) == encode(made)
    store = make_store(tmp_path / "r.sqlite")
    assert store.append(made, step=5)
    store.close()
    (stored,) = load_groups(tmp_path / "r.sqlite")
    assert (stored.arrival, stored.step, parts(stored.group)) == (1, 5, parts(made))


def test_columns_that_json_cannot_hold_are_left_out_and_named():
    prompt = dataclasses.replace(group().prompt, columns={"answer": "4", "image": object(), "bytes": b"x"})
    payload = encode(dataclasses.replace(group(), prompt=prompt))
    assert decode(payload).prompt.columns == {"answer": "4"}
    length = int.from_bytes(payload[4:8], "little")
    assert json.loads(payload[8 : 8 + length])["prompt"]["left_out"] == ["bytes", "image"]


def test_a_row_can_be_read_by_any_client(tmp_path):
    store = make_store(tmp_path / "r.sqlite")
    made = dataclasses.replace(
        group(41),
        trajectories=(
            trajectory(rewards={"right": 1.0, "short": float("nan")}, version=4),
            trajectory(rewards={"right": 0.0, "short": -0.5}),
        ),
    )
    store.append(made, step=9)
    store.append(dataclasses.replace(group(42), trajectories=(), num_lost=2), step=9)
    store.close()
    database = sqlite3.connect(tmp_path / "r.sqlite")
    first, second = database.execute("SELECT * FROM groups").fetchall()
    # combined: 2 * 1 + nothing = 2, and 2 * 0 - .5 = -.5; their mean is .75
    means = json.dumps({"right": 0.5, "short": -0.5})
    assert first[:12] == (1, "searcher-3.aa", 41, 3, "p", 9, 3, 2, 2, 1, 0.75, means)
    assert second[:12] == (
        *(2, "searcher-3.aa", 42, 3, "p", 9, None, None, 0, 2, None),
        json.dumps({"right": None, "short": None}),
    )
    assert first[13] == zlib.crc32(json.dumps(first[:13]).encode() + first[14])
    # the layout of the payload, by hand: 8 bytes, the header, 2 prompt ids, 4 rewards, then 6 token ids
    start = 8 + int.from_bytes(first[14][4:8], "little")
    assert np.frombuffer(first[14], "<i4", 2, start).tolist() == [1, 2]
    assert np.frombuffer(first[14], "<i4", 6, start + 2 * 4 + 4 * 8).tolist() == [5, 6, 7, 5, 6, 7]
    assert database.execute("SELECT * FROM incarnations").fetchall() == [("searcher-3.aa", 42)]


def test_only_committed_groups_are_reported_and_each_once(tmp_path):
    store = make_store(tmp_path / "r.sqlite")
    for number in range(5):
        store.append(group(number), step=0)
    store.flush()
    reader = sqlite3.connect(tmp_path / "r.sqlite")
    assert reader.execute("SELECT COUNT(*) FROM groups").fetchone() == (5,)
    assert store.committed() == [f"searcher-3.aa/{number}" for number in range(5)]
    assert store.committed() == []
    reader.close()
    store.close()


def test_a_group_that_is_sent_again_is_acknowledged_again_but_not_stored_twice(tmp_path):
    path = tmp_path / "r.sqlite"
    store = make_store(path)
    assert [store.append(group(number), step=0) for number in (0, 1, 0)] == [True, True, False]
    store.close()
    store = make_store(path)  # a new trainer, to which the searcher sends what was not acknowledged
    sent = [
        (1, "searcher-3.aa"),
        (2, "searcher-3.aa"),
        (0, "searcher-3.bb"),
        (0, "searcher-3.aa"),
        (2, "searcher-3.aa"),
    ]
    assert [store.append(group(number, sender=sender), step=1) for number, sender in sent] == [
        *(False, True, True, False, False)
    ]
    store.flush()
    assert store.committed() == [f"{sender}/{number}" for number, sender in sent]
    store.close()
    assert ids_in(path) == ["searcher-3.aa/0", "searcher-3.aa/1", "searcher-3.aa/2", "searcher-3.bb/0"]
    assert [stored.arrival for stored in load_groups(path, after=2)] == [3, 4]


def test_the_oldest_rows_leave_when_newer_ones_hold_the_capacity(tmp_path):
    store = make_store(tmp_path / "r.sqlite", capacity=5)
    for number in range(6):
        store.append(group(number, responses=2), step=number)
        store.flush()
    # rows 4 and 5 hold 4 responses, which is fewer than 5: row 3 stays, of which the buffer may hold one
    assert [stored.group.id for stored in store.load()] == [f"searcher-3.aa/{number}" for number in (3, 4, 5)]
    assert not store.append(group(0), step=9)  # its row has left, its number has not
    store.close()


def test_the_file_stops_growing_when_rows_leave(tmp_path):
    path, sizes = tmp_path / "r.sqlite", []
    store = make_store(path, capacity=40)
    for number in range(200):
        store.append(group(number, responses=2, tokens=range(300)), step=number)
        store.flush()
        if number % 50 == 49:
            sizes.append(sqlite3.connect(path).execute("PRAGMA page_count").fetchone()[0])
    store.close()
    assert len(ids_in(path)) == 20
    # A row is inserted before the oldest leaves: there is room for one more than stay.
    assert len(set(sizes)) == 1
    assert sizes[0] < 2 * 21 * 2 * 300 * 17 / 4096


def test_a_snapshot_is_one_file_with_everything_appended_before(tmp_path):
    store = make_store(tmp_path / "r.sqlite")
    for number in range(3):
        store.append(group(number), step=0)
    store.snapshot(tmp_path / "copy.sqlite")
    store.append(group(3), step=0)
    store.snapshot(tmp_path / "later.sqlite")
    assert ids_in(tmp_path / "copy.sqlite") == [f"searcher-3.aa/{number}" for number in range(3)]
    assert len(ids_in(tmp_path / "later.sqlite")) == 4
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.sqlite", "later.sqlite", "r.sqlite", "r.stored"]


def test_a_snapshot_can_be_taken_while_another_thread_appends(tmp_path):
    store, taken = make_store(tmp_path / "r.sqlite", capacity=10**6), threading.Event()
    store.append(group(0), step=0)

    def snapshot():
        try:
            store.snapshot(tmp_path / "copy.sqlite")
        finally:
            taken.set()

    thread = threading.Thread(target=snapshot)
    thread.start()
    number = 0
    while not taken.is_set():
        number += 1
        store.append(group(number), step=0)
    thread.join()
    store.close()
    copied = ids_in(tmp_path / "copy.sqlite")
    assert copied == [f"searcher-3.aa/{number}" for number in range(len(copied))]
    assert len(ids_in(tmp_path / "r.sqlite")) == number + 1


def test_a_snapshot_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path):
    store = make_store(tmp_path / "r.sqlite")
    with pytest.raises(DurableReplayError, match="could not be written"):
        store.snapshot(tmp_path / "nowhere" / "copy.sqlite")
    store.append(group(), step=0)
    store.close()
    assert len(ids_in(tmp_path / "r.sqlite")) == 1


@pytest.mark.parametrize("column", ["payload", "reward"])
def test_a_corrupt_row_is_named_and_left_out(tmp_path, caplog, column):
    path = tmp_path / "r.sqlite"
    store = make_store(path)
    for number in range(3):
        store.append(group(number), step=0)
    store.close()
    with sqlite3.connect(path) as database:
        (payload,) = database.execute("SELECT payload FROM groups WHERE arrival = 2").fetchone()
        value = bytes([*payload[:-1], payload[-1] ^ 1]) if column == "payload" else 0.25
        database.execute(f"UPDATE groups SET {column} = ? WHERE arrival = 2", (value,))
    assert ids_in(path) == ["searcher-3.aa/0", "searcher-3.aa/2"]
    assert "row 2 is corrupt and left out: the checksum of group searcher-3.aa/1 does not match" in caplog.text
    assert "1 of 3 rows were corrupt" in caplog.text


def test_damage_in_the_file_costs_the_rows_it_is_in(tmp_path, caplog):
    path = tmp_path / "r.sqlite"
    store = make_store(path)
    for number in range(20):
        store.append(group(number, tokens=range(1000 * number, 1000 * number + 900)), step=0)
    store.close()
    content = bytearray(path.read_bytes())
    place = content.index(np.arange(7100, 7140, dtype="<i4").tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert ids_in(path) == [f"searcher-3.aa/{number}" for number in range(20) if number != 7]
    assert "row 8 is corrupt" in caplog.text
    content[4096:8192] = bytes(4096)  # the root of the table
    path.write_bytes(content)
    with pytest.raises(DurableReplayError, match=r"could not be read .*malformed"):
        ids_in(path)


def test_another_schema_version_is_refused(tmp_path):
    path = tmp_path / "r.sqlite"
    make_store(path).close()
    sqlite3.connect(path).execute("PRAGMA user_version = 7")
    for use in (make_store, ids_in):
        with pytest.raises(
            DurableReplayError, match=r"schema version 7, .* reads 1: use the version of tba that wrote it"
        ):
            use(path)


def test_the_database_of_another_program_is_not_to_be_removed(tmp_path):
    sqlite3.connect(tmp_path / "r.sqlite").execute("CREATE TABLE mine (a)")
    with pytest.raises(DurableReplayError, match=r"is the database of another program: give a run folder"):
        ids_in(tmp_path / "r.sqlite")
    (tmp_path / "cut.sqlite").touch()
    with pytest.raises(DurableReplayError, match=r"cut\.sqlite is empty: give a run folder"):
        ids_in(tmp_path / "cut.sqlite")


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "r.sqlite").write_text("hello" * 1000)
    with pytest.raises(DurableReplayError, match=r"could not be opened .*file is not a database"):
        make_store(tmp_path / "r.sqlite")
    with pytest.raises(DurableReplayError, match="there is no durable replay"):
        ids_in(tmp_path / "nothing.sqlite")


def test_a_caller_waits_by_name_while_too_much_is_unwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "MAX_PENDING_BYTES", 1)
    store, seen = make_store(tmp_path / "r.sqlite"), []
    room = store._has_room
    monkeypatch.setattr(store, "_has_room", lambda size: seen.append(store.row.wait) or room(size))
    for number in range(3):
        store.append(group(number), step=0)
    assert set(seen) == {"none", "durable_replay"}
    assert store.row["wait_seconds"] > 0
    store.close()
    assert len(ids_in(tmp_path / "r.sqlite")) == 3


def output_of(script: str, folder: Path, *arguments: str) -> tuple[str, str]:
    """What Python that has this file's helpers writes, in a process of its own that works in the folder."""
    path = folder / "script.py"
    path.write_text("import sys\nfrom test_durable import *\n" + textwrap.dedent(script))
    done = run_python(str(path), *(str(folder / name) for name in arguments))
    return done.stdout, done.stderr


def send_for_ever(path: Path, acknowledged: Path, number: int, told: int) -> None:
    """A trainer whose searcher sends groups from `number` on; it writes what it acknowledges to a file of its own."""
    store, known = make_store(path, capacity=10**6), acknowledged.open("a")
    while True:
        store.append(group(number, tokens=range(50 + number % 100)), step=0)
        committed = store.committed()
        known.writelines(f"{group_id}\n" for group_id in committed)
        known.flush()
        os.write(told, b"." * len(committed))
        number += 1


def test_what_was_acknowledged_is_there_after_kill_9_and_nothing_twice(tmp_path):
    """In each of its lives the trainer is sent again what was not acknowledged before, and a few groups that were."""
    script = """
        path, acknowledged, stored = Path(sys.argv[1]), Path(sys.argv[2]), []
        acknowledged.touch()
        for awaited in np.random.default_rng(0).integers(1, 200, 6).tolist():
            known = acknowledged.read_text().splitlines()
            first = max(0, int(known[-1].split("/")[1]) - 1) if known else 0
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                send_for_ever(path, acknowledged, first, writer)
            while awaited > 0:
                awaited -= len(os.read(reader, awaited))
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(reader), os.close(writer)
            stored, known = ids_in(path), acknowledged.read_text().splitlines()
            assert set(known) <= set(stored), sorted(set(known) - set(stored))
            assert stored == [f"searcher-3.aa/{number}" for number in range(len(stored))], stored
        print(len(stored))
    """
    out, err = output_of(script, tmp_path, "r.sqlite", "acknowledged")
    assert int(out or "0") > 200, err


def test_a_full_disk_is_one_clear_error_and_what_was_acknowledged_stays(tmp_path):
    script = """
        import resource
        path = Path(sys.argv[1])
        store = make_store(path)
        store.append(group(0), step=0)
        store.flush()
        print(store.committed())
        limit = sum(file.stat().st_size for file in path.parent.iterdir()) + 20_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            for number in range(1, 10_000):
                store.append(group(number, tokens=range(1000)), step=0)
                store.flush()
        except DurableReplayError as error:
            print(error)
            print(number, len(store._committed))
        store.close()
        print("closed")
    """
    out, err = output_of(script, tmp_path, "r.sqlite")
    first, message, counts, last = out.splitlines() or [err]
    failed, acknowledged = map(int, counts.split())
    assert (first, last, acknowledged) == ("['searcher-3.aa/0']", "closed", failed - 1)
    for words in ("r.sqlite could not be written", "OperationalError", "bytes are free there", "replay.durability=off"):
        assert words in message
    assert ids_in(tmp_path / "r.sqlite") == [f"searcher-3.aa/{number}" for number in range(failed)]


MOUNTS = r"""
22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:26 / /home rw - nfs4 server:/home rw
31 22 0:27 / /home/me/local\040disk rw - xfs /dev/sdb rw
32 22 0:28 / /mnt/s rw - fuse.sshfs me@there:/ rw
33 22 0:29 / /mnt/usb rw - fuseblk /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data", None),
        ("/home/me", "nfs4"),
        ("/homes", None),
        ("/home/me/local disk/runs", None),
        ("/mnt/s/runs", "fuse.sshfs"),
        ("/mnt/usb", None),
    ],
)
def test_a_network_filesystem_is_told_from_a_local_one(tmp_path, path, kind):
    (tmp_path / "mountinfo").write_text(MOUNTS.lstrip())
    assert network_filesystem(Path(path), tmp_path / "mountinfo") == kind


def test_on_a_network_filesystem_the_file_is_made_elsewhere_and_copied_back(tmp_path, monkeypatch, caplog):
    run, temporary = tmp_path / "run", tmp_path / "tmp"
    run.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("tba.replay.database.network_filesystem", lambda path: "nfs4" if path == run else None)
    path = place_database(run / "replay.sqlite")
    assert path.is_relative_to(temporary)
    assert f"{run} is on a network filesystem (nfs4)" in caplog.text
    assert find_database(run / "replay.sqlite") == path
    store = make_store(path, final_copy=run / "replay.sqlite")
    store.append(group(), step=0)
    store.flush()
    assert place_database(run / "replay.sqlite") == path  # by a trainer that goes on after a crash
    assert len(ids_in(path)) == 1
    store.close()
    assert sorted(file.name for file in run.iterdir()) == ["replay.sqlite", "replay.stored"]
    assert len(ids_in(find_database(run / "replay.sqlite"))) == 1
    assert not list(temporary.iterdir())


def test_groups_after_a_row_are_forgotten_and_their_ids_may_come_again(tmp_path):
    store = make_store(tmp_path / "r.sqlite")
    for number in range(5):
        store.append(group(number), step=number)
    store.append(group(0, sender="searcher-3.bb"), step=5)
    assert store.return_to(3, HighWaterMarks({"searcher-3.aa": 2})) == 3
    assert ids_in(store.path) == ["searcher-3.aa/0", "searcher-3.aa/1", "searcher-3.aa/2"]
    assert not store.append(group(2), step=3)
    assert store.append(group(3), step=3)
    assert store.append(group(0, sender="searcher-3.bb"), step=3)
    store.close()
    assert [(s.arrival, s.group.id) for s in load_groups(store.path)][3:] == [
        (4, "searcher-3.aa/3"), (5, "searcher-3.bb/0"),
    ]  # fmt: skip
    with sqlite3.connect(store.path) as database:
        assert dict(database.execute("SELECT * FROM incarnations")) == {"searcher-3.aa": 3, "searcher-3.bb": 0}


def test_what_is_kept_for_the_buffer_is_counted_anew_when_rows_are_forgotten(tmp_path):
    store = make_store(tmp_path / "r.sqlite", capacity=6)  # three groups of two responses
    for number in range(3):
        store.append(group(number), step=0)
    store.return_to(1, HighWaterMarks({"searcher-3.aa": 0}))
    for number in (1, 2, 3):
        store.append(group(number), step=1)
    store.close()
    assert ids_in(store.path) == ["searcher-3.aa/1", "searcher-3.aa/2", "searcher-3.aa/3"]


def test_new_groups_are_numbered_after_those_that_a_checkpoint_holds(tmp_path):
    """A checkpoint may hold groups whose commit never came: a new one under their number would not be taken in again."""
    store = make_store(tmp_path / "r.sqlite")
    store.append(group(0), step=0)
    store.go_on_after(4)
    store.append(group(1), step=0)
    assert store.last_arrival == 5
    assert [stored.arrival for stored in store.load(after=4)] == [5]
    store.close()
