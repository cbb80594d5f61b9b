"""Checkpoints: what they hold is what was there when they were saved, whole and checked, whoever writes them when."""

import errno
import gc
import json

import numpy as np
import pytest
import torch
from builders import tiny_llama, tiny_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.config import TrainConfig
from tba.observe.files import OutputLost
from tba.observe.run_folder import RunFolder
from tba.trainer.checkpoint import Checkpoints, CorruptCheckpoint, check_manifest, restore, take_snapshot
from tba.trainer.health import CollapseGuard
from tba.trainer.optimizer import MasterAdamW


class Counter:
    """The smallest part of a run."""

    def __init__(self):
        self.count = 0

    def state(self):
        return {"count": self.count}

    def load_state(self, state):
        self.count = state["count"]


@pytest.fixture
def checkpoints(tmp_path):
    model = tiny_llama()
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    optimizer = MasterAdamW(model.parameters(), TrainConfig())
    made = Checkpoints(folder, model, tiny_tokenizer(), optimizer, heads=[], parts={"counter": Counter()}, keep=2)
    yield made
    made.close()


def move(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for master in optimizer.masters:
        master.grad = torch.randn(master.shape, generator=generator)
    optimizer.step(0.01)


def test_the_files_of_a_checkpoint_are_as_readable_as_the_umask_says(checkpoints):
    checkpoints.save(1)
    path = checkpoints.by_step()[1]
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1, (
        "safetensors would leave the weights to their owner"
    )


def test_a_checkpoint_holds_what_was_there_when_it_was_saved(checkpoints):
    move(checkpoints.optimizer, 1)
    before = [parameter.detach().clone() for parameter in checkpoints.model.parameters()]
    checkpoints.parts["counter"].count = 7
    checkpoints.save(3)
    move(checkpoints.optimizer, 2)
    checkpoints.parts["counter"].count = 8
    path = checkpoints.by_step()[3]
    check_manifest(path)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(before, loaded.parameters()))
    assert AutoTokenizer.from_pretrained(path)("w5 w6")["input_ids"] == [5, 6]
    assert "lm_head.weight" not in load_file(path / "model.safetensors"), "tied weights are written once"
    checkpoints.load(path)
    assert checkpoints.parts["counter"].count == 7
    assert all(torch.equal(a, b) for a, b in zip(before, checkpoints.model.parameters()))
    assert json.loads((path / "trainer.json").read_text()) == {"step": 3, "seed": 0}


def test_a_state_that_is_larger_in_every_checkpoint_leaves_nothing_in_memory(checkpoints):
    class Growing(Counter):
        def state(self):
            return {"count": self.count, "array": np.zeros(self.count), "tensor": torch.zeros(self.count)}

    part = checkpoints.parts["counter"] = Growing()

    def classes_after(step):
        part.count = 1000 + step
        checkpoints.save(step)
        checkpoints.wait()
        gc.collect()
        return sum(isinstance(found, type) for found in gc.get_objects())

    first = classes_after(1)
    assert [classes_after(step) for step in (2, 3, 4)] == [first] * 3, (
        "ctypes keeps a class for each size that it has met"
    )


def test_a_state_of_another_version_is_refused_in_one_sentence(checkpoints):
    checkpoints.save(1)
    path = checkpoints.by_step()[1]
    checkpoints.parts["pace"] = Counter()
    with pytest.raises(ValueError, match=r"step-1 was saved by another version of tba: its state has no 'pace'"):
        checkpoints.load(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_continues_with_its_moments_and_masters(checkpoints, dtype):
    model = checkpoints.model = tiny_llama().to(dtype)
    checkpoints.optimizer = MasterAdamW(model.parameters(), TrainConfig())
    move(checkpoints.optimizer, 1)
    checkpoints.save(1)
    move(checkpoints.optimizer, 2)
    want = [master.detach().clone() for master in checkpoints.optimizer.masters]
    checkpoints.model = tiny_llama(seed=5).to(dtype)
    checkpoints.optimizer = MasterAdamW(checkpoints.model.parameters(), TrainConfig())
    checkpoints.load(checkpoints.by_step()[1])
    move(checkpoints.optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(want, checkpoints.optimizer.masters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), checkpoints.model.parameters(), strict=True))


def test_a_checkpoint_that_cannot_be_written_is_told_and_named_at_the_end(checkpoints, caplog):
    folder = checkpoints.folder.checkpoints
    folder.rmdir()
    folder.write_text("a file where the folder should be")
    checkpoints.save(1)
    checkpoints.wait()
    assert f"checkpoint {folder / 'step-1'} cannot be written" in caplog.text
    with pytest.raises(OutputLost, match=r"1 of its files could not be written: .*step-1"):
        checkpoints.failures.raise_lost()


def test_a_lost_checkpoint_is_named_at_the_end_unless_it_would_be_dropped_by_then(checkpoints, monkeypatch):
    """Two stay here. The disk fails while step 2 is synced; after steps 3 and 4 nobody misses it."""

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    checkpoints.save(1)
    checkpoints.wait()
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fails)
        checkpoints.save(2)
        checkpoints.wait()
    checkpoints.save(3)
    assert sorted(checkpoints.by_step()) == [1, 3]
    with pytest.raises(OutputLost, match=r"1 of its files could not be written: .*step-2\."):
        checkpoints.failures.raise_lost()
    checkpoints.save(4)
    assert sorted(checkpoints.by_step()) == [3, 4]
    checkpoints.failures.raise_lost()


def test_any_other_error_of_the_writer_is_raised_by_the_next_call(checkpoints, monkeypatch):
    monkeypatch.setattr("tba.trainer.checkpoint.write_manifest", lambda path: 1 / 0)

    def save() -> None:
        checkpoints.save(1)  # also this one, where the writer is quick: behind the writing it asks for the dropping
        checkpoints.save(2)

    with pytest.raises(ZeroDivisionError):
        save()


def test_the_last_ones_stay_and_the_pinned_one(checkpoints):
    for step in (1, 2, 3):
        checkpoints.save(step)
    assert sorted(checkpoints.by_step()) == [2, 3]
    checkpoints.pinned = 2
    for step in (4, 5):
        checkpoints.save(step)
    assert sorted(checkpoints.by_step()) == [2, 4, 5]


def test_those_that_the_guard_holds_stay_and_do_not_count(checkpoints):
    checkpoints.held.add(1)
    checkpoints.save(1)
    checkpoints.save_held(1)  # it is there, and counts
    checkpoints.save(2)
    checkpoints.held.add(3)
    checkpoints.save_held(3)
    for step in (4, 5, 6):
        checkpoints.save(step)
    assert sorted(checkpoints.by_step()) == [1, 3, 5, 6]
    checkpoints.load(checkpoints.by_step()[3])
    assert (checkpoints.held, checkpoints.extra) == ({1, 3}, {3})
    checkpoints.release(3)
    checkpoints.release(1)
    assert sorted(checkpoints.by_step()) == [1, 5, 6]
    checkpoints.save(7)
    assert sorted(checkpoints.by_step()) == [6, 7]


def test_the_best_that_a_checkpoint_knows_stays_as_long_as_that_checkpoint_is_the_newest(checkpoints):
    def best():
        return sorted(checkpoints.by_step("best-step-"))

    checkpoints.save_evaluated(10)
    checkpoints.keep_best(10, 0.5)
    checkpoints.save(10)
    checkpoints.save_evaluated(20)
    checkpoints.keep_best(20, 0.6)
    assert best() == [10, 20]
    checkpoints.save(20)
    assert best() == [20]
    checkpoints.save_evaluated(30)
    checkpoints.keep_best(30, 0.7)
    assert best() == [20, 30]
    checkpoints.load(checkpoints.by_step()[20])
    checkpoints.drop_after(20)
    assert (checkpoints.best, best()) == ((20, 0.6), [20])
    checkpoints.save_evaluated(30)
    checkpoints.keep_best(30, 0.7)
    checkpoints.drop_outdone()
    assert best() == [30]


@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_a_damaged_file_is_named(checkpoints, damage):
    checkpoints.save(1)
    path = checkpoints.by_step()[1]
    file = path / "optimizer.safetensors"
    if damage == "gone":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptCheckpoint, match=r"step-1 is damaged: optimizer\.safetensors"):
        check_manifest(path)


def test_a_restored_guard_raises_the_alarm_at_the_same_step():
    well = {
        "completions/mean_length": 200.0,
        "completions/clipped_ratio": 0.05,
        "entropy": 0.5,
        "reward": 0.6,
        "kl": 10.0,
    }
    guard = CollapseGuard()
    for step in range(60):
        guard.step(step, well)
    restored = CollapseGuard()
    restored.load_state(restore(*take_snapshot(guard.state())))
    guards = [guard, restored]
    for step in range(60, 90):
        first, second = (found.step(step, well | {"completions/mean_length": 4.0}) for found in guards)
        assert first == second
    assert first is not None
