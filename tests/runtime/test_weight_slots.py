"""Weights between processes: what is fetched is what was published, or an error says so."""

import numpy as np
import pytest
import torch

from tba.models.weights import CANARY_TOKENS, CanaryCheck, CanaryMismatch, ChecksumMismatch, checksum
from tba.runtime.weight_slots import WeightSlots

CANARY = np.linspace(-3, -1, CANARY_TOKENS)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), value), "b": torch.arange(7.0) + value}


def publish(slots: WeightSlots, value: float, version: int) -> None:
    slots.publish(tensors(value), version=version)
    slots.add_canary(CANARY + version)


def other_process(slots: WeightSlots) -> WeightSlots:
    """A second view of the same memory, as a searcher has it."""
    return WeightSlots.attach(slots.handle())


def test_the_newest_version_is_fetched_with_its_canary():
    slots = WeightSlots.create(tensors(0.0), torch.float32)
    reader = other_process(slots)
    assert reader.newest_version == -1
    for version in (0, 3, 7):
        publish(slots, float(version), version)
        assert reader.newest_version == version
        published = reader.fetch()
        assert published.version == version
        assert all(torch.equal(published.tensors[name], want) for name, want in tensors(float(version)).items())
        assert np.array_equal(reader.canary(version), CANARY + version)


def test_weights_travel_in_the_dtype_of_the_slots():
    slots = WeightSlots.create(tensors(0.0), torch.bfloat16)
    publish(slots, 0.1, 1)
    fetched = other_process(slots).fetch().tensors["a"]
    assert torch.equal(fetched, torch.full((3, 5), 0.1).bfloat16())


def test_a_slot_that_is_being_written_is_not_visible():
    slots = WeightSlots.create(tensors(0.0), torch.float32)
    publish(slots, 1.0, 1)
    reader = other_process(slots)
    with pytest.raises(KeyError):
        slots.publish({"unknown": torch.zeros(1)}, version=2)  # fails half-way
    assert reader.newest_version == 1
    assert reader.fetch().version == 1


def test_a_canary_is_there_only_for_its_own_version():
    slots = WeightSlots.create(tensors(0.0), torch.float32)
    publish(slots, 0.0, 0)
    slots.publish(tensors(1.0), version=1)
    reader = other_process(slots)
    assert (reader.newest_version, reader.canary(1)) == (1, None)
    assert np.array_equal(reader.canary(0), CANARY)
    slots.add_canary(CANARY + 1)
    assert np.array_equal(reader.canary(1), CANARY + 1)
    publish(slots, 2.0, 2)
    assert reader.canary(0) is None, "its slot was taken"


def test_a_reader_that_is_overtaken_tries_again(monkeypatch):
    slots = WeightSlots.create(tensors(0.0), torch.float32)
    publish(slots, 1.0, 1)
    reader = other_process(slots)
    version = 1
    real_copy = torch.Tensor.copy_

    def overtaking_copy(target, source):
        """While the reader copies its first tensor, the trainer publishes twice and so laps it."""
        nonlocal version
        monkeypatch.setattr(torch.Tensor, "copy_", real_copy)
        for _ in range(2):
            version += 1
            publish(slots, float(version), version)
        return real_copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", overtaking_copy)
    published = reader.fetch()
    assert published.version == 3
    assert torch.equal(published.tensors["b"], torch.arange(7.0) + 3)


def test_a_flipped_byte_is_fatal_and_names_the_values():
    slots = WeightSlots.create(tensors(0.0), torch.float32)
    publish(slots, 1.0, 4)
    slots._tensors[0]["b"].view(torch.uint8)[5] ^= 1
    with pytest.raises(ChecksumMismatch, match="version 4 have checksum 0x"):
        other_process(slots).fetch()


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
