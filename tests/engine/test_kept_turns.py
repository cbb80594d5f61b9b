"""A turn that another request goes on from: its keys and values are kept, and only what came after it is computed."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import keep_in_pages, make_prompt, make_tiny_model, make_weights_of, plain_log_probs

from tba.engine.native.engine import NativeEngine
from tba.engine.native.kept_turns import KeptTurns
from tba.types import Prompt, Request, Sampling

ANSWER = np.array([5, 9, 11, 4, 7], np.int32)
SAMPLING = Sampling(max_new_tokens=40)


class Conversation:
    """Requests of three prompts with two samples each, whose turns are answered twice."""

    def __init__(self, *, goes_on):
        rng = np.random.default_rng(0)
        self.prompts = [
            Prompt(id=f"p{n}", token_ids=rng.integers(3, 37, size=4 + 7 * n).astype(np.int32), text="")
            for n in range(3)
        ]
        self.ready = [Request(prompt=prompt, samples=2, goes_on=goes_on) for prompt in self.prompts]
        self.turns, self.finished, self.goes_on = {}, {}, goes_on

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
        prefix = np.concatenate((completion.token_ids, ANSWER)).astype(np.int32)
        self.ready.append(
            Request(prompt=prompt, first_sample=key[1], samples=1, prefix_ids=prefix, goes_on=self.goes_on)
        )


def talk(model, *, goes_on, **options):
    made, passes = make_engine(model, **options)
    conversation = Conversation(goes_on=goes_on)
    for completion in made.generate(conversation, samples_per_prompt=1, sampling=SAMPLING):
        conversation.received(completion)
    return conversation.finished, sum(passes), made


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


def make_engine(model, **options):
    """An engine, and the rows and tokens of each of its prefill passes."""
    made = NativeEngine(model, **{"stop_ids": list(range(24, 37)), "seed": 1, "slots": 4, "max_length": 128, **options})
    passes, store_only = [], made.decoder.store_only

    def counted(ids, positions, attend):
        passes.append(len(ids))
        return store_only(ids, positions, attend)

    made.decoder.store_only = counted
    return made, passes


def answered(request, completion):
    """The request for the next turn of a response."""
    prefix = np.concatenate((completion.token_ids, ANSWER)).astype(np.int32)
    return replace(request, first_sample=completion.sample_index, samples=1, prefix_ids=prefix)


def script(engine, steps, **options):
    """Completions of a call whose requests are chosen by `steps`: a function of all completions so far, which gives the
    requests to hand out now, or None at the end."""
    done, ready = [], []

    def requests():
        seen = -1
        while True:
            if len(done) != seen:
                seen = len(done)
                if (more := steps(done)) is None:
                    return
                ready.extend(more)
            yield ready.pop(0) if ready else None

    for completion in engine.generate(requests(), samples_per_prompt=1, sampling=SAMPLING, **options):
        done.append(completion)
    return done


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
def test_after_new_weights_turns_are_those_of_the_new_weights(paged, monkeypatch):
    if paged:
        keep_in_pages(monkeypatch)
    models = [make_tiny_model("llama", seed=seed) for seed in range(3)]
    engine, _ = make_engine(models[0])
    request = Request(prompt=make_prompt("p", 11), samples=1, goes_on=True)

    def steps(done):
        if len(done) == 3:
            return None
        if done:  # two loads: numbers may stay the same, as those of a trainer that went back to a checkpoint
            assert len(engine.cache.turns) == 1
            engine.load(make_weights_of(models[len(done)], 0))
            assert len(engine.cache.turns) == 0
        return [answered(request, done[-1])] if done else [request]

    for model, turn in zip(models, script(engine, steps), strict=True):
        own = slice(turn.num_prefix_tokens, None)
        expected = plain_log_probs(model, request.prompt.token_ids, turn.token_ids)
        np.testing.assert_allclose(turn.policy_log_probs[own], expected[own], atol=2e-4)


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
def test_a_response_that_saw_two_versions_keeps_nothing(paged, monkeypatch):
    if paged:
        keep_in_pages(monkeypatch)
    model = make_tiny_model("llama")
    engine, _ = make_engine(model, stop_ids=[36])
    request = Request(prompt=make_prompt("p", 11), samples=1, goes_on=True)
    steps_made = []

    def between_steps():
        steps_made.append(0)
        if len(steps_made) == 5:
            engine.load(make_weights_of(make_tiny_model("llama", seed=1), 1))
        if len(steps_made) == 10:
            engine.end_early([request])

    def steps(done):
        assert len(engine.cache.turns) == 0
        return None if done else [request]

    (turn,) = script(engine, steps, between_steps=between_steps)
    assert [version for _, version in turn.version_spans] == [0, 1]


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
def test_a_turn_that_was_ended_early_goes_on_from_its_keys_and_values(paged, monkeypatch):
    if paged:
        keep_in_pages(monkeypatch)
    model = make_tiny_model("llama")
    engine, passes = make_engine(model, stop_ids=[36])
    request = Request(prompt=make_prompt("p", 11), samples=2, goes_on=True)

    def steps(done):
        assert len(engine.cache.turns) == len(done) % 2 or len(done) in (2, 4)
        return {0: [request], 2: [answered(request, turn) for turn in done], 4: None}.get(len(done), [])

    def between_steps():
        if any(len(running.token_ids) == 6 for running in engine.running_tokens([request])):
            engine.end_early([request])

    turns = script(engine, steps, between_steps=between_steps)
    assert [len(turn.token_ids) for turn in turns[:2]] == [7, 7]
    for turn in turns[2:]:
        own = slice(turn.num_prefix_tokens, None)
        expected = plain_log_probs(model, request.prompt.token_ids, turn.token_ids)
        np.testing.assert_allclose(turn.policy_log_probs[own], expected[own], atol=2e-4)
    # Two turns of 17 tokens in the cache: 5 each are computed, and up to 3 of a page that was not full.
    assert sum(passes) - 12 <= 2 * (5 + 3)


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
def test_an_episode_that_has_ended_keeps_nothing(paged, monkeypatch):
    if paged:
        keep_in_pages(monkeypatch)
    engine, _ = make_engine(make_tiny_model("llama"))
    requests = [Request(prompt=make_prompt(name, 11), samples=1, goes_on=True) for name in "ab"]

    def steps(done):
        if len(done) == 2:
            assert len(engine.cache.turns) == 2
            # Complete: the engine hands it out, and nothing follows.
            whole = replace(SAMPLING, max_new_tokens=len(done[0].token_ids))
            own = next(request for request in requests if request.prompt.id == done[0].prompt_id)
            return [replace(own, prefix_ids=done[0].token_ids, sampling=whole)]
        if len(done) == 3:
            assert len(engine.cache.turns) == 1
            return None
        return [] if done else requests

    assert len(script(engine, steps)) == 3


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
def test_a_call_that_is_left_early_keeps_nothing(paged, monkeypatch):
    if paged:
        keep_in_pages(monkeypatch)
    engine, _ = make_engine(make_tiny_model("llama"))
    requests = [Request(prompt=make_prompt(name, 11), samples=2, goes_on=True) for name in "ab"]
    before = [turn.token_ids.tolist() for turn in engine.generate(requests, samples_per_prompt=1, sampling=SAMPLING)]
    responses = engine.generate(requests, samples_per_prompt=1, sampling=SAMPLING)
    next(responses)
    assert len(engine.cache.turns) > 0
    responses.close()
    assert len(engine.cache.turns) == 0
    if paged:
        assert engine.cache.pool.references.sum() == 0
    again = [turn.token_ids.tolist() for turn in engine.generate(requests, samples_per_prompt=1, sampling=SAMPLING)]
    assert again == before


def test_where_pages_are_short_other_turns_leave_before_the_one_that_goes_on(monkeypatch):
    keep_in_pages(monkeypatch)
    model = make_tiny_model("llama")
    # 15 pages: room for one response of full length (11 + 40 tokens), and for two turns of 28 tokens and a page.
    page_bytes = make_engine(model)[0].cache.pool.page_bytes
    engine, passes = make_engine(model, stop_ids=[36], max_cache_bytes=16 * page_bytes)
    requests = [Request(prompt=make_prompt(name, 11), samples=1, goes_on=True) for name in "ab"]

    def between_steps():
        for request in requests:
            if any(len(running.token_ids) == 17 for running in engine.running_tokens([request])):
                engine.end_early([request])

    def steps(done):
        if len(done) == 2:
            assert [turn.prompt_id for turn in done] == ["a", "b"]
            assert len(engine.cache.turns) == 2
            passes.clear()
            return [answered(requests[0], done[0])]
        return {0: requests[:1], 1: requests[1:], 3: None}[len(done)]

    script(engine, steps, between_steps=between_steps)
    # All 28 tokens of the turn are in whole pages: the answer alone is computed.
    assert sum(passes) == len(ANSWER)


def test_turns_of_one_prompt_go_on_together(monkeypatch):
    keep_in_pages(monkeypatch)
    engine, passes = make_engine(make_tiny_model("llama"))
    request = Request(prompt=make_prompt("p", 21), samples=4, goes_on=True)

    def steps(done):
        if len(done) == 4:
            passes.clear()
            return [answered(request, turn) for turn in done]
        return None if len(done) == 8 else [] if done else [request]

    script(engine, steps)
    assert len(passes) == 1


def test_single_turns_fill_the_free_slots():
    engine, _ = make_engine(make_tiny_model("llama"), stop_ids=[36], slots=8)
    requests = [Request(prompt=make_prompt(f"p{number}", 5 + number), samples=1) for number in range(8)]
    running = []
    between_steps = lambda: running.append(len(engine.running_tokens(requests)))  # noqa: E731
    list(engine.generate(requests, samples_per_prompt=8, sampling=SAMPLING, between_steps=between_steps))
    assert running[0] == 8


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
    assert turns.take(("b", 0), np.array([1, 2, 3, 4])) == "b"
    assert turns.take(("b", 0), np.array([1, 2, 3, 4])) is None
    turns.keep(("c", 0), "d")
    assert released == ["a", "c"]
    assert len(turns) == 1
