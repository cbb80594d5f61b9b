"""A saved and restored state continues exactly: a replay buffer with everything inside, and the parts it is made of."""

import json
from collections import deque

import numpy as np
import pytest
import torch
from builders import ragged_batch
from replay_builders import Groups, contents, replay
from safetensors.numpy import load, save

from tba.trainer.checkpoint import restore, take_snapshot


def saved_and_read(value):
    """Through the bytes that a checkpoint would hold."""
    tree, arrays = take_snapshot(value)
    return restore(json.loads(json.dumps(tree)), load(save(arrays)))


def assert_same_batch(left, right):
    assert left.prompt_ids == right.prompt_ids
    for name in ("token_ids_N", "offsets", "log_ref_N", "behaviour_N", "policy_N", "reward_PK", "weight_PK", "rows_PK"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name


SETTINGS = {
    "mixed": {"on_policy_probability": 0.5, "deduplicate": False},
    "softmax": {"on_policy_probability": 0.3, "inverse_temperature": 2.0},
    "importance": {"on_policy_probability": 0.5, "importance_weighted": True},
    "queue": {"max_uses": 2, "deduplicate": False, "max_waiting_groups": 9},
    "expiry": {"on_policy_probability": 0.5, "deduplicate": False},
}


def use(buffer, rng, groups, first, last, longest=39):
    """Add, evict, expire, reset references and sample at random; returns the batches."""
    batches = []
    for step in range(first, last):
        for _ in range(4):
            tokens = [rng.integers(0, 4, rng.integers(1, longest + 1)).tolist() for _ in range(4)]
            # Some come late, and expire before others that came earlier.
            name, version = f"p{rng.integers(12)}", max(0, step - int(rng.integers(8)))
            buffer.add(
                groups(name, tokens, rng.normal(size=4).tolist(), version=version, reference=step // 20), step=step
            )
        buffer.expire(step - 8)
        if step % 20 == 0:
            buffer.drop_reference(step // 20)
        batches.append(buffer.sample(3, 3, step=step))
        if step % 3 == 0 and len(buffer):
            batches.append(buffer.sample(1, 6, step=step))
    return batches


def assert_goes_on_alike(make, longest=39):
    """A buffer and its restored copy make the same batches of the same groups."""
    buffer, rng, groups = make(), np.random.default_rng(1), Groups()
    use(buffer, rng, groups, 0, 33, longest)
    again = make()
    again.load_state(saved_and_read(buffer.state()))
    assert contents(again) == contents(buffer)
    later, count = rng.bit_generator.state, groups.count
    want = use(buffer, rng, groups, 33, 70, longest)
    rng.bit_generator.state, groups.count = later, count
    got = use(again, rng, groups, 33, 70, longest)
    for left, right in zip(want, got, strict=True):
        assert_same_batch(left, right)
    assert again.stats() == buffer.stats()
    assert contents(again) == contents(buffer)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_restored_buffer_draws_evicts_and_counts_as_it_would_have(name):
    assert_goes_on_alike(lambda: replay(fresh_steps=2, capacity=90, capacity_per_prompt=30, **SETTINGS[name]))


@pytest.mark.parametrize("name", ["softmax", "importance"])
def test_a_restored_buffer_draws_alike_where_copies_have_left_gaps(name):
    # Responses of at most two of four tokens: most groups replace copies in the middle of a prompt's responses.
    assert_goes_on_alike(lambda: replay(fresh_steps=2, **SETTINGS[name]), longest=2)


@pytest.mark.parametrize("inverse_temperature", [0.0, 2.0])
def test_a_restored_buffer_draws_alike_from_thousands_of_which_some_have_expired(inverse_temperature):
    def make():
        return replay(on_policy_probability=0.0, deduplicate=False, inverse_temperature=inverse_temperature)

    buffer, groups, again = make(), Groups(), make()
    for group in range(30):  # every other group is of version 0 and leaves: 1,500 of 3,000 responses stay
        buffer.add(groups("a", [[5 + group, 5 + i] for i in range(100)], version=group % 2), step=1)
    assert buffer.expire(1) == 1500
    again.load_state(saved_and_read(buffer.state()))
    for _ in range(5):
        assert_same_batch(buffer.sample(1, 8, step=2), again.sample(1, 8, step=2))


def test_a_state_is_read_in_the_process_that_made_it():
    buffer, again, groups = replay(), replay(), Groups()
    buffer.add(groups("a", [[5, 6], [7]]), step=0)
    again.load_state(buffer.state())
    again.add(groups("a", [[7]]), step=0)
    assert len(again) == 2, "the copy is found and replaced"


def test_a_buffer_goes_on_with_other_settings():
    """Scores were stored without a softmax, and nothing was a queue."""
    buffer, group = replay(on_policy_probability=0.0, deduplicate=False), Groups()
    buffer.add(group("a", [[5], [6]], rewards=[0.0, 1.0]), step=0)
    weighted = replay(on_policy_probability=0.0, deduplicate=False, inverse_temperature=1000.0)
    weighted.load_state(saved_and_read(buffer.state()))
    weighted.add(group("b", [[7], [8]], rewards=[0.0, 1.0]), step=0)
    assert sorted(weighted.sample(2, 1, step=0).token_ids_N.tolist()) == [6, 8], "the better of each"
    queue = replay(max_uses=1, deduplicate=False)
    queue.load_state(saved_and_read(buffer.state()))
    assert sorted(queue.sample(1, 2, step=0).token_ids_N.tolist()) == [5, 6]
    assert len(queue) == 0


def test_a_snapshot_does_not_follow_the_buffer():
    buffer, rng, groups = replay(capacity=90), np.random.default_rng(1), Groups()
    use(buffer, rng, groups, 0, 5)
    before, taken = contents(buffer), take_snapshot(buffer.state())
    use(buffer, rng, groups, 5, 30)
    again = replay(capacity=90)
    again.load_state(restore(*taken))
    assert contents(again) == before


def test_untouched_capacity_takes_no_room():
    buffer = replay(capacity=1_000_000, deduplicate=False)
    buffer.add(Groups()("a", [[5, 6], [7]]), step=0)
    assert sum(array.size for array in take_snapshot(buffer.state())[1].values()) < 2**20


def test_arrays_and_bytes_come_back():
    column = np.arange(6, dtype=np.int16).reshape(2, 3)
    found = saved_and_read(
        {"column": column, "every other": column[:, ::2], "bytes": bytearray(b"abc"), "none": bytearray()}
    )
    found["column"][0, 0] = 7
    assert found["column"].tolist() == [[7, 1, 2], [3, 4, 5]]
    assert found["column"].dtype == np.int16
    assert found["every other"].tolist() == [[0, 2], [3, 5]]
    assert (found["bytes"], found["none"]) == (b"abc", b"")


def test_containers_come_back_as_they_were():
    value = {
        1: (2.5, float("inf"), None),
        ("a", 0): {3, 4},
        "order": {5: None, 2: None},
        "queue": deque([(1, {"x": 0.1})], maxlen=3),
        "bf16": torch.tensor([1.0, 3.0], dtype=torch.bfloat16),
    }
    found = saved_and_read(value)
    assert found["queue"].maxlen == 3
    assert list(found["order"]) == [5, 2]
    assert torch.equal(found.pop("bf16"), value.pop("bf16"))
    assert found == value


def test_a_batch_comes_back_tensor_by_tensor():
    batch = ragged_batch()
    found = saved_and_read(batch)
    assert_same_batch(batch, found)
    assert all(torch.equal(a, b) for a, b in zip(batch.prompt_tokens, found.prompt_tokens))
    assert torch.equal(batch.rewards["score"], found.rewards["score"])
    assert vars(found.totals) == vars(batch.totals)


def test_what_is_not_plain_data_is_refused():
    with pytest.raises(TypeError, match="a function cannot be saved"):
        take_snapshot({"f": lambda: None})
    with pytest.raises(KeyError):
        restore({"kind": "Tensor", "name": "3", "dtype": "int64"}, {})
