"""Memory that roles share: reserved when it is made, or refused."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tba.runtime.counters import PLACES, WAITS, SharedCounters, SharedMemory

MEBIBYTE = 2**20


def test_memory_is_zeroed_and_the_same_for_all_who_map_it(tmp_path):
    memory = SharedMemory.create(4096, [tmp_path])
    other = SharedMemory(memory.fd, 4096)
    assert not memory.array(np.uint8).any()
    memory.array(np.int64)[5] = 42
    assert other.array(np.int64)[5] == 42
    assert list(tmp_path.iterdir()) == [], "nothing is left to tidy up"


def test_every_byte_has_its_place_from_the_start(tmp_path):
    """A file that only claims its size has no blocks; writing it where none is left is SIGBUS."""
    memory = SharedMemory.create(MEBIBYTE, [tmp_path])
    assert os.fstat(memory.fd).st_blocks * 512 >= MEBIBYTE


def test_without_room_in_the_first_folder_the_next_is_taken_and_named(tmp_path, caplog):
    missing = tmp_path / "missing"
    memory = SharedMemory.create(4096, [missing, tmp_path])
    assert memory.num_bytes == 4096
    assert f"lie in {tmp_path}" in caplog.text
    assert f"{missing} is no folder" in caplog.text


def test_without_room_anywhere_the_error_names_size_folders_and_remedy(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEBIBYTE, before[1]))
    try:
        with pytest.raises(
            MemoryError, match=r"8\.0 MiB of memory .* cannot be reserved: .* free \(File too large\).*TMPDIR"
        ):
            SharedMemory.create(8 * MEBIBYTE, [tmp_path])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


IN_A_SMALL_FOLDER = """
import logging, pathlib, subprocess, sys
import numpy as np
from tba.runtime.counters import SharedMemory

small, large = map(pathlib.Path, sys.argv[1:])
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)]).returncode:
    sys.exit(77)
logging.basicConfig()
(small / "of others").write_bytes(bytes(1_500_000))
memory = SharedMemory.create(1_048_576, [small, large])
memory.array(np.uint8)[:] = 1  # SIGBUS where it lies in the small one
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a mount of its own")
def test_a_small_folder_in_ram_is_left_for_one_with_room_and_never_sigbus(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir(), large.mkdir()
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", IN_A_SMALL_FOLDER]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(
            [*command, str(small), str(large)], capture_output=True, text=True, timeout=120, env=environment
        )
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode == 77 or "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("mounting is not allowed here")
    assert done.returncode == 0, done.stderr
    assert "1.0 MiB of shared memory lie in" in done.stderr
    assert f"{small} has 0.6 MiB free (No space left on device)" in done.stderr


def test_memory_in_ram_where_there_is_room(caplog):
    memory = SharedMemory.create(4096)
    assert memory.array(np.uint8).nbytes == 4096
    if Path("/dev/shm").is_dir():
        assert caplog.text == ""


def test_a_trainer_in_its_first_step_moves_and_the_status_says_so():
    counters = SharedCounters.create()
    counters.trainer["beats"] = 1.0
    assert counters.trainer_progress() != counters.trainer_progress()
    assert [role.doing for role in counters.statuses()] == ["makes its first step, which compiles kernels on a GPU"]
    counters.trainer["made"] = 1.0
    assert counters.trainer_progress() == counters.trainer_progress() == 1.0
    assert [role.doing for role in counters.statuses()] == ["works"]
    counters.trainer.clear()
    assert [role.doing for role in counters.statuses()] == ["starts"]


def test_a_status_says_how_much_of_a_batch_or_an_evaluation_is_there():
    counters = SharedCounters.create()
    trainer, row = counters.trainer, counters.searcher(0)
    trainer["beats"], trainer["wait"] = 1.0, WAITS.index("first_fill")
    trainer["batch_prompts"], trainer["prompts_wanted"] = 13.0, 16.0
    row["place"], row["heartbeat"], row["done"], row["of"] = PLACES.index("filled"), 1.0, 40.0, 100.0
    assert [role.doing for role in counters.statuses()] == [
        "waits for the first batch: 13 of 16 prompts",
        "evaluates the start model: 40 of 100 responses",
    ]
    trainer["step"], trainer["wait"], trainer["done"], trainer["of"], row["of"] = 5.0, 0.0, 2.0, 8.0, 0.0
    assert [role.doing for role in counters.statuses()] == ["evaluates step 5: 2 of 8 responses", "generates"]
