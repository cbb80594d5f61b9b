"""Random sequences of calls against a slow, obvious buffer."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replay_builders import Groups, SlowReplay, contents, replay, responses

NAMES = st.sampled_from("abcd")
RESPONSES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=9)
REWARDS = st.sampled_from([0.0, 1.0, -1.0, 500.0, -500.0, 1e30, -1e30])


class ReplayMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(1, 80),
        per_prompt=st.integers(1, 40),
        deduplicate=st.booleans(),
        inverse_temperature=st.sampled_from([0.0, 1.0]),
        m=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def start(self, capacity, per_prompt, deduplicate, inverse_temperature, m):
        limits = {"capacity": capacity, "capacity_per_prompt": per_prompt, "deduplicate": deduplicate}
        self.buffer = replay(**limits, fresh_steps=2, on_policy_probability=m, inverse_temperature=inverse_temperature)
        self.slow = SlowReplay(**limits)
        self.groups, self.last, self.step, self.oldest_reference = Groups(), None, 0, 0

    @rule(name=NAMES, tokens=RESPONSES, reward=REWARDS, reference=st.integers(0, 1), late=st.integers(0, 1))
    def add(self, name, tokens, reward, reference, late):
        self.step += late
        rewards = [reward + i for i in range(len(tokens))]
        self.last = self.groups(name, tokens, rewards=rewards, reference=reference, version=self.step)
        stored = self.buffer.add(self.last, step=self.step)
        if reference >= self.oldest_reference:
            self.slow.add(self.last, self.step)
        assert (stored > 0) == (reference >= self.oldest_reference)

    @precondition(lambda self: self.last is not None)
    @rule()
    def send_again(self):
        assert self.buffer.add(self.last, step=self.step) == 0

    @precondition(lambda self: self.slow.rows)
    @rule(P=st.integers(1, 5), K=st.integers(1, 6), choice=st.integers(0, 9))
    def sample(self, P, K, choice):
        references = sorted({row[1] for row in self.slow.rows})
        reference = references[choice % len(references)]
        batch = self.buffer.sample(P, K, step=self.step, reference_version=reference)
        stored = [row for row in self.slow.rows if row[1] == reference]
        if self.buffer.config.on_policy_probability == 1:
            stored = self.slow.fresh(reference, step=self.step, fresh_steps=2, P=P)
        prompts = {row[0] for row in stored}
        assert set(batch.prompt_ids) <= prompts
        assert len(set(batch.prompt_ids)) == min(P, len(prompts))
        self.check_responses(batch, stored)

    def check_responses(self, batch, stored):
        """Each is one of the stored of its prompt, with its own reward; none repeats unless there are fewer than K."""
        K, m = batch.shape[1], self.buffer.config.on_policy_probability
        groups = zip(batch.prompt_ids, batch.rows_PK.tolist(), responses(batch), batch.reward_PK.tolist())
        for name, rows, tokens, reward in groups:
            allowed = [(row[2], np.float32(row[3])) for row in stored if row[0] == name]
            assert set(zip(tokens, map(np.float32, reward))) <= set(allowed)
            if len(allowed) >= K and m in (0, 1):
                assert len(set(rows)) == K

    @rule()
    def reset_the_reference(self):
        self.oldest_reference = 1
        self.buffer.drop_reference(1)
        self.slow.drop_reference(1)

    @invariant()
    def holds_exactly_what_the_slow_one_holds(self):
        expected = [(*row[:3], float(np.float32(row[3]))) for row in self.slow.rows]
        assert contents(self.buffer) == expected
        assert len(self.buffer) == len(expected)
        assert self.buffer.num_prompts == len({row[0] for row in expected})
        assert self.buffer.stats()["tokens"] == sum(len(row[2]) for row in expected)


ReplayMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRandomSequences = ReplayMachine.TestCase


def test_contents_survive_where_some_responses_stay_and_others_come_again_and_again():
    buffer, groups = replay(capacity_per_prompt=100), Groups()
    slow = SlowReplay(capacity=1000, capacity_per_prompt=100, deduplicate=True)
    for number in range(40):  # 0 and 1 stay, 2 to 4 come again and again
        tokens = [[0], [1], [2], [3], [4]] if number == 0 else [[2], [3], [4], [100 + number]]
        group = groups("a", tokens)
        buffer.add(group, step=0)
        slow.add(group)
        assert contents(buffer) == [row[:4] for row in slow.rows]


def test_contents_survive_many_evictions_of_long_and_short_responses():
    limits = {"capacity": 60, "capacity_per_prompt": 12, "deduplicate": False}
    buffer, slow = replay(**limits), SlowReplay(**limits)
    groups, rng = Groups(), np.random.default_rng(0)
    for _ in range(400):
        lengths = rng.choice([1, 3, 20, 100], size=4)
        group = groups(str(rng.integers(8)), [rng.integers(0, 9, n).tolist() for n in lengths])
        buffer.add(group, step=0)
        slow.add(group)
        assert buffer.stats()["tokens"] == sum(len(row[2]) for row in slow.rows)
    assert contents(buffer) == [row[:4] for row in slow.rows]


def test_what_is_kept_of_groups_follows_what_is_stored_where_one_old_response_stays():
    """A prompt that is never drawn again keeps the oldest response; 1,000 groups behind it come and go."""
    buffer, groups = replay(capacity_per_prompt=2), Groups()
    buffer.add(groups("old", [[1]]), step=0)
    for number in range(1, 1001):
        buffer.add(groups(f"p{number % 7}", [[number], [number + 1]]), step=number)
    assert contents(buffer)[0][:3] == ("old", 0, (1,))
    assert len(buffer) == 15
    assert len(buffer.state()["groups"]) < 100
