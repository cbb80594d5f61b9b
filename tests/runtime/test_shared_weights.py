"""Weights between processes: what is fetched is what was published, or an error says so."""

import multiprocessing
import sys

import numpy as np
import pytest
import targets
import torch

from tba.models.weights import CANARY_TOKENS, CanaryCheck, CanaryMismatch
from tba.runtime.processes import RoleProcess
from tba.runtime.shared_weights import (
    MAX_CHECKSUM_MISSES,
    ChecksumMismatch,
    PackedWriter,
    SharedWeights,
    checksum,
    layout_of,
)
from tba.runtime.weight_memory import data_bytes
from tba.types import copy_all

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
CANARY = np.linspace(-3, -1, CANARY_TOKENS)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), value), "b": torch.arange(7.0) + value}


def publish(buffers: SharedWeights, value: float, version: int) -> None:
    buffers.publish(tensors(value), version=version)
    buffers.add_canary(CANARY + version)


def other_process(buffers: SharedWeights) -> SharedWeights:
    """A second view of the same memory, as a searcher has it."""
    return SharedWeights.attach(buffers.handle())


def test_the_newest_version_is_fetched_with_its_canary():
    buffers = SharedWeights.create(tensors(0.0), torch.float32)
    reader = other_process(buffers)
    assert reader.newest_version == -1
    for version in (0, 3, 7):
        publish(buffers, float(version), version)
        assert reader.newest_version == version
        published = reader.fetch()
        assert published.version == version
        assert all(torch.equal(published.tensors[name], want) for name, want in tensors(float(version)).items())
        assert np.array_equal(reader.canary(version), CANARY + version)


def test_weights_travel_in_the_dtype_of_the_slots():
    buffers = SharedWeights.create(tensors(0.0), torch.bfloat16)
    publish(buffers, 0.1, 1)
    fetched = other_process(buffers).fetch().tensors["a"]
    assert torch.equal(fetched, torch.full((3, 5), 0.1).bfloat16())


def publish_on_gpu(pipe):
    """Another process: publishes two versions in the GPU's memory, and keeps that until they are read."""
    buffers = SharedWeights.create(tensors(0.0), torch.float32, device=torch.device("cuda"))
    pipe.send(buffers.handle())
    for version in (1, 2):
        buffers.publish({name: tensor.cuda() for name, tensor in tensors(float(version)).items()}, version=version)
        pipe.send(version)
        pipe.recv()


@pytest.mark.cuda
@NEEDS_GPU
def test_weights_on_a_gpu_arrive_from_another_process():
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=publish_on_gpu, args=(its,), daemon=True)
    process.start()
    reader = SharedWeights.attach(mine.recv())
    for version in (1, 2):
        assert mine.recv() == version
        fetched = reader.fetch()
        assert fetched.version == version
        for name, want in tensors(float(version)).items():
            assert fetched.tensors[name].is_cuda
            assert torch.equal(fetched.tensors[name].cpu(), want)
        mine.send(None)
    process.join(60)


@pytest.mark.parametrize("rows", [1, 2, 100], ids=lambda rows: f"{rows} rows at once")
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_GPU])], ids=["cpu", "cuda"]
)
def test_packing_in_parts_writes_the_bytes_and_the_checksum_of_packing_at_once(device, rows):
    torch.manual_seed(0)  # 12, 20,002, 40,000 and 6 bytes: tensors that end within a row, and one of several rows
    own = {name: torch.randn(shape) for name, shape in {"a": (6,), "b": (73, 137), "c": (20_000,), "d": (3,)}.items()}
    layout = layout_of(own, torch.bfloat16)
    wanted = torch.zeros(data_bytes(layout), dtype=torch.uint8)
    for spec in layout:
        wanted[spec.offset : spec.offset + spec.num_bytes] = own[spec.name].bfloat16().flatten().view(torch.uint8)
    found = torch.full_like(wanted, 255)
    writer = PackedWriter(layout, torch.device(device), part_bytes=rows * 16_384)
    for _ in range(2):
        summed = writer.write({name: tensor.to(device) for name, tensor in own.items()}, found)
        assert torch.equal(found, wanted)
        assert summed == checksum(wanted)


@pytest.mark.cuda
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_gpu_pass_through_locked_host_memory(dtype):
    def on_gpu(value: float) -> dict[str, torch.Tensor]:
        return {name: tensor.to("cuda", dtype) for name, tensor in tensors(value).items()}

    buffers = SharedWeights.create(on_gpu(0.0), torch.bfloat16)
    reader = other_process(buffers)
    for version in (1, 2, 3):
        published, fetched = buffers.publish(on_gpu(version / 10), version=version), reader.fetch()
        assert torch.from_numpy(buffers.memory.array(np.uint8)).is_pinned()
        assert fetched.tensors["a"].is_pinned()
        for name, tensor in on_gpu(version / 10).items():
            assert torch.equal(fetched.tensors[name], tensor.bfloat16().cpu())
            assert torch.equal(published.tensors[name].cpu(), tensor.bfloat16().cpu())
            assert published.tensors[name].is_cuda == (dtype == torch.bfloat16)
    memory = fetched.tensors["a"]
    del reader, fetched
    assert not memory.is_pinned(), "the driver has given the pages back"


def test_a_bundle_of_other_tensors_than_the_slots_were_made_for_is_refused():
    """A tensor left out would silently keep the value of the version before last."""
    buffers = SharedWeights.create(tensors(0.0), torch.float32)
    publish(buffers, 1.0, 1)
    with pytest.raises(ValueError, match="'b', it is not in what is published"):
        buffers.publish({"a": torch.zeros(3, 5)}, version=2)
    with pytest.raises(ValueError, match="'c', the buffers have no place for it"):
        buffers.publish({**tensors(2.0), "c": torch.zeros(1)}, version=2)
    assert other_process(buffers).fetch().version == 1


def test_tensors_of_several_dtypes_and_strides_are_published():
    mixed = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.full((4,), 0.1, dtype=torch.float64)}
    buffers = SharedWeights.create(mixed, torch.bfloat16)
    buffers.publish(mixed, version=1)
    fetched = other_process(buffers).fetch().tensors
    assert all(torch.equal(fetched[name], want.bfloat16()) for name, want in mixed.items())


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_GPU])], ids=["cpu", "cuda"]
)
def test_tensors_copied_together_are_those_copied_one_by_one(device):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (2, 4), (), (300_000,), (4, 2), (0, 3)]
    sources = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    sources += [sources[2].t(), sources[0].bfloat16(), sources[1].double()]
    kinds = [torch.float32, torch.bfloat16]
    targets = [torch.zeros(source.shape, dtype=kinds[i % 2], device=device) for i, source in enumerate(sources)]
    copy_all(targets, sources)
    assert all(torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources))
    with pytest.raises(ValueError, match="shorter"):
        copy_all(targets, sources[:-1])


@pytest.mark.cuda
@NEEDS_GPU
@pytest.mark.parametrize("says_so", [True, False])
def test_a_fetch_on_a_gpu_waits_for_the_work_that_reads_the_copy(says_so):
    """The reader's stream is held up by a long kernel in front of a read of what was fetched; the next fetch comes at once
    and must not change what that read finds."""
    size = 2**20
    buffers = SharedWeights.create({"a": torch.zeros(size)}, torch.float32, device=torch.device("cuda"))
    buffers.publish({"a": torch.ones(size, device="cuda")}, version=1)
    first = buffers.fetch()
    torch.cuda._sleep(200_000_000)
    read = first.tensors["a"].clone()
    if says_so:
        buffers.loaded()
    with torch.cuda.stream(torch.cuda.Stream()):  # as another process would: not behind the long kernel
        buffers.publish({"a": torch.full((size,), 2.0, device="cuda")}, version=2)
    second = buffers.fetch()
    assert second.version == 2
    torch.cuda.synchronize()
    assert bool((read == 1.0).all())
    assert bool((second.tensors["a"] == 2.0).all())


def test_a_slot_that_is_being_written_is_not_visible():
    buffers = SharedWeights.create(tensors(0.0), torch.float32)
    publish(buffers, 1.0, 1)
    reader = other_process(buffers)
    with pytest.raises(RuntimeError):
        buffers.publish({**tensors(2.0), "b": torch.zeros(8)}, version=2)  # fails half-way
    assert reader.newest_version == 1
    assert reader.fetch().version == 1


def test_a_canary_is_there_only_for_its_own_version():
    buffers = SharedWeights.create(tensors(0.0), torch.float32)
    publish(buffers, 0.0, 0)
    buffers.publish(tensors(1.0), version=1)
    reader = other_process(buffers)
    assert (reader.newest_version, reader.canary(1)) == (1, None)
    assert np.array_equal(reader.canary(0), CANARY)
    buffers.add_canary(CANARY + 1)
    assert np.array_equal(reader.canary(1), CANARY + 1)
    publish(buffers, 2.0, 2)
    assert reader.canary(0) is None, "its buffer was taken"


def test_a_reader_that_is_overtaken_tries_again(monkeypatch):
    buffers = SharedWeights.create(tensors(0.0), torch.float32)
    publish(buffers, 1.0, 1)
    reader = other_process(buffers)
    version = 1
    real_copy = torch.Tensor.copy_

    def overtaking_copy(target, source):
        """While the reader copies its first tensor, the trainer publishes twice and so laps it."""
        nonlocal version
        monkeypatch.setattr(torch.Tensor, "copy_", real_copy)
        for _ in range(2):
            version += 1
            publish(buffers, float(version), version)
        return real_copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", overtaking_copy)
    published = reader.fetch()
    assert published.version == 3
    assert torch.equal(published.tensors["b"], torch.arange(7.0) + 3)


def test_a_flipped_byte_is_fatal_and_names_the_values(caplog):
    buffers = SharedWeights.create(tensors(0.0), torch.float32)
    publish(buffers, 1.0, 4)
    buffers._tensors[0]["b"].view(torch.uint8)[5] ^= 1
    with pytest.raises(ChecksumMismatch, match="version 4 have checksum 0x"):
        other_process(buffers).fetch()
    assert caplog.text.count("They are copied again.") == MAX_CHECKSUM_MISSES - 1


def test_a_torn_copy_is_copied_again(monkeypatch, caplog):
    """The first copy lacks its last bytes though the sequence number has not changed, as where stores arrive late."""
    buffers = SharedWeights.create(tensors(0.0), torch.float32)
    publish(buffers, 1.0, 4)
    reader, real_copy = other_process(buffers), torch.Tensor.copy_

    def torn_copy(target, source):
        monkeypatch.setattr(torch.Tensor, "copy_", real_copy)
        real_copy(target, source)
        target[-8:] = 0
        return target

    buffers._data[0][-8:] = 77  # padding is part of what is compared
    buffers._headers[0][2] = np.uint64(checksum(buffers._data[0])).astype(np.int64)
    monkeypatch.setattr(torch.Tensor, "copy_", torn_copy)
    fetched = reader.fetch()
    assert fetched.version == 4
    assert torch.equal(fetched.tensors["b"], torch.arange(7.0) + 1)
    assert "weights of version 4 have checksum" in caplog.text


def test_a_reader_beside_a_process_that_publishes_never_sees_half_a_version(tmp_path):
    """Large enough that a copy takes longer than a turn of either process."""
    buffers = SharedWeights.create({"a": torch.zeros(400_000), "b": torch.zeros(7)}, torch.float32)
    buffers.publish({"a": torch.zeros(400_000), "b": torch.zeros(7)}, version=0)
    arguments = {"weights": buffers.handle(), "count": 100}
    process = RoleProcess(
        "writer", targets.publishes, arguments, log=tmp_path / "writer.log", fds=(buffers.memory.fd,), forked=True
    )
    seen = [0]
    while seen[-1] < 100:
        assert process.alive, (tmp_path / "writer.log").read_text()
        fetched = buffers.fetch()
        seen.append(fetched.version)
        assert all((tensor == fetched.version).all() for tensor in fetched.tensors.values())
    process.kill()
    assert seen == sorted(seen)


def test_fences_stand_where_the_order_of_stores_matters(monkeypatch):
    """What another core may see at each: the odd number before any data, all data before the even number, that before the
    count of publications; and the canary's numbers before the version that they belong to."""
    buffers = SharedWeights.create(tensors(0.0), torch.float32)
    header, seen = buffers._headers[0], []

    def looks() -> None:
        data = "old" if buffers._tensors[0]["a"][0, 0] == 0.0 else "new"
        seen.append((int(header[0]), data, int(header[1]), buffers.number))

    monkeypatch.setattr("tba.runtime.weight_memory.fence", looks)
    buffers.publish(tensors(5.0), version=9)
    assert seen == [(1, "old", 0, 0), (1, "new", 9, 0), (2, "new", 9, 0)]
    canary = buffers._canaries[0]
    monkeypatch.setattr("tba.runtime.weight_memory.fence", lambda: seen.append((canary[-1], int(header[3]))))
    buffers.add_canary(CANARY)
    assert seen[3:] == [(CANARY[-1], 0)]
    assert header[3] == 10


@pytest.mark.parametrize("size", [16_384 * 3 + 8 * 5 + 3, 16_384, 8, 7])
def test_the_checksum_is_that_of_a_sum_in_plain_numbers(size):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    text, numbers = bytes(data.tolist()), size // 8
    values = [int.from_bytes(text[8 * i : 8 * i + 8], sys.byteorder) for i in range(numbers)]
    rows = [sum(values[start : start + 2048]) for start in range(0, numbers // 2048 * 2048, 2048)]
    rows.append(sum(values[numbers // 2048 * 2048 :]) + sum(text[8 * numbers :]))
    weighted = sum(place * row for place, row in enumerate(rows, start=1))
    plain = sum(rows) % 2**64
    assert checksum(data) == weighted % 2**64 ^ (plain << 17) % 2**64 ^ plain >> 47


@pytest.mark.parametrize("row", range(4))
def test_the_checksum_sees_every_bit_in_every_row(row):
    """Sums wrap around: where a row is multiplied by an even number its highest bits must be seen otherwise."""
    data = torch.zeros(4 * 16_384, dtype=torch.uint8)
    seen = set()
    for bit in range(64):
        data[16_384 * row + bit // 8] = 1 << bit % 8
        seen.add(checksum(data))
        data[16_384 * row + bit // 8] = 0
    assert len(seen - {checksum(data)}) == 64


def test_the_checksum_sees_values_order_and_place():
    values = torch.arange(10_000.0)
    base = checksum(values.view(torch.uint8))
    moved, changed = values.clone(), values.clone()
    moved[[0, 9_999]] = moved[[9_999, 0]]
    changed[5_000] += 1e-3
    assert checksum(moved.view(torch.uint8)) != base
    assert checksum(changed.view(torch.uint8)) != base
    assert checksum(values.flip(0).contiguous().view(torch.uint8)) != base
    assert checksum(values.clone().view(torch.uint8)) == base


def test_the_canary_sets_its_tolerance_at_version_0_and_then_judges():
    check = CanaryCheck()
    check.check(published=CANARY, computed=CANARY + 1e-4, version=0)
    assert check.tolerance == pytest.approx(5e-4)
    check.check(published=CANARY + 1.0, computed=CANARY + 1.0004, version=5)
    with pytest.raises(CanaryMismatch, match=r"version 6 differs by 0\.001"):
        check.check(published=CANARY + 1.0, computed=CANARY + 1.001, version=6)


def test_a_searcher_that_never_loads_is_caught_by_the_canary():
    check = CanaryCheck()
    check.check(published=CANARY, computed=CANARY, version=0)
    with pytest.raises(CanaryMismatch):
        check.check(published=CANARY + 0.5, computed=CANARY, version=1)
