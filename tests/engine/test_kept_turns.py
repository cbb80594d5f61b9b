"""A turn that another request goes on from: its keys and values are kept, and only what came after it is computed."""

import numpy as np
import pytest
from tiny_models import keep_in_pages, make_tiny_model, make_weights_of

from tba.engine.native.engine import NativeEngine
from tba.engine.native.kept_turns import KeptTurns
from tba.types import Prompt, Request, Sampling

ANSWER = np.array([5, 9, 11, 4, 7], np.int32)
SAMPLING = Sampling(max_new_tokens=40)


class Conversation:
    """Requests of three prompts with two samples each, whose turns are answered twice."""

    def __init__(self, *, goes_on, on_answer=lambda: None):
        rng = np.random.default_rng(0)
        self.prompts = [
            Prompt(id=f"p{n}", token_ids=rng.integers(3, 37, size=4 + 7 * n).astype(np.int32), text="")
            for n in range(3)
        ]
        self.ready = [Request(prompt=prompt, samples=2, goes_on=goes_on) for prompt in self.prompts]
        self.turns, self.finished, self.on_answer, self.goes_on = {}, {}, on_answer, goes_on

    def __iter__(self):
        while len(self.finished) < 6:
            yield self.ready.pop(0) if self.ready else None

    def received(self, completion):
        key = completion.prompt_id, completion.sample_index
        self.turns[key] = self.turns.get(key, 0) + 1
        prompt = self.prompts[int(completion.prompt_id[1:])]
        length = completion.num_prefix_tokens
        assert np.isfinite(completion.policy_log_probs[length:]).all()
        if self.turns[key] == 3 or len(completion.token_ids) + len(ANSWER) >= SAMPLING.max_new_tokens:
            self.finished[key] = completion
            return
        self.on_answer()
        prefix = np.concatenate((completion.token_ids, ANSWER)).astype(np.int32)
        self.ready.append(
            Request(prompt=prompt, first_sample=key[1], samples=1, prefix_ids=prefix, goes_on=self.goes_on)
        )


def talk(model, *, goes_on, on_answer=None, **options):
    made = NativeEngine(model, stop_ids=list(range(24, 37)), seed=1, slots=4, max_length=128, **options)
    computed, store_only = [0], made.decoder.store_only

    def counted(ids, positions, attend):
        computed[0] += len(ids)
        return store_only(ids, positions, attend)

    made.decoder.store_only = counted
    conversation = Conversation(goes_on=goes_on, on_answer=(lambda: on_answer(made)) if on_answer else lambda: None)
    for completion in made.generate(conversation, samples_per_prompt=1, sampling=SAMPLING):
        conversation.received(completion)
    return conversation.finished, computed[0], made


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_turns_go_on_as_if_they_were_computed_again(family, paged, monkeypatch):
    if paged:
        keep_in_pages(monkeypatch)
    model = make_tiny_model(family)
    plain, computed, _ = talk(model, goes_on=False)
    kept, fewer, engine = talk(model, goes_on=True)
    assert kept.keys() == plain.keys()
    for key, completion in kept.items():
        assert completion.token_ids.tolist() == plain[key].token_ids.tolist()
        np.testing.assert_allclose(completion.policy_log_probs, plain[key].policy_log_probs, atol=2e-5)
    # Later turns alone are computed: their prompts and turns before were there.
    assert fewer < 0.7 * computed
    assert len(engine.cache.turns) == 0  # a call that has ended keeps nothing
    if paged:
        assert engine.cache.pool.references.sum() == 0


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
def test_new_weights_compute_turns_again(paged, monkeypatch):
    if paged:
        keep_in_pages(monkeypatch)
    model, versions = make_tiny_model("llama"), iter(range(1, 100))

    def load(engine):
        engine.load(make_weights_of(model, next(versions)))

    finished, _, engine = talk(model, goes_on=True, on_answer=load)
    assert len(finished) == 6
    assert len(engine.cache.turns) == 0


def test_pages_of_turns_make_room_for_responses_that_run(monkeypatch):
    keep_in_pages(monkeypatch)
    model = make_tiny_model("llama")
    plain, _, plain_engine = talk(model, goes_on=False)
    # Room for two responses of full length and little more.
    page_bytes = plain_engine.cache.pool.page_bytes
    kept, _, engine = talk(model, goes_on=True, max_cache_bytes=36 * page_bytes)
    assert {key: c.token_ids.tolist() for key, c in kept.items()} == {
        key: c.token_ids.tolist() for key, c in plain.items()
    }
    assert engine.cache.pool.references.sum() == 0


def test_the_oldest_turn_leaves_first_and_others_only_with_their_tokens():
    released = []
    turns = KeptTurns(2, released.append)
    for name in "abc":
        turns.keep((name, 0), name).ids = np.array([1, 2, 3])
    assert released == ["a"]
    assert turns.take(("a", 0), np.array([1, 2, 3, 4])) is None
    assert turns.take(("b", 0), np.array([1, 2, 4, 4])) is None
    assert turns.take(("b", 0), np.array([1, 2, 3, 4])).stored == "b"
    assert turns.take(("b", 0), np.array([1, 2, 3, 4])) is None
    turns.keep(("c", 0), "d")
    assert released == ["a", "c"]
    assert len(turns) == 1
