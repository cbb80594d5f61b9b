"""Episodes token by token: those of the engine against a loop that generates turn by turn, and against a plain pass."""

from dataclasses import replace

import games
import numpy as np
import pytest
import torch
from builders import tiny_llama
from chat_families import family_tokenizer

from tba.engine.native.engine import NativeEngine
from tba.models.weights import make_weights
from tba.searcher.loop import group_texts
from tba.tasks.environments.chat_format import ChatFormat
from tba.tasks.environments.episodes import EpisodeEngine, seed_of
from tba.tasks.environments.host import EnvironmentSpec
from tba.tasks.environments.workers import Environments
from tba.tasks.rewards.pool import RewardUnusable
from tba.types import Completion, Prompt, Request, Sampling, Trajectory, TrajectoryGroup

TOKENIZER = family_tokenizer("qwen_2_5")
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SAMPLING = Sampling(max_new_tokens=120)


@pytest.fixture(scope="module")
def model():
    model = tiny_llama(0, vocab_size=len(TOKENIZER), max_position_embeddings=1400)
    with torch.no_grad():  # turns of some ten tokens: the end-of-turn token is likely
        model.lm_head.weight[STOP] = 3.0 * model.lm_head.weight[STOP]
    return model


def make_engine(model, **options):
    return NativeEngine(model, stop_ids=[STOP], seed=0, slots=6, max_length=1400, **options)


@pytest.fixture
def episodes_of(tmp_path):
    made = []

    def make(model, kind, **options):
        made.append(episode_engine(model, tmp_path, kind, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def episode_engine(model, folder, kind, **options):
    spec = EnvironmentSpec(classes={kind.__name__: kind}, rewards={kind.__name__: kind.__name__}, copies=True)
    environments = Environments(spec, log=folder / "environments.log")
    return EpisodeEngine(make_engine(model), lambda: environments, TOKENIZER, seed=0, **options)


def prompt_of(number):
    messages = [{"role": "user", "content": f"Problem {number}."}]
    return Prompt(id=f"p{number}", token_ids=ChatFormat(TOKENIZER).prompt_ids(messages), text=messages)


def by_turns(model, prompt, sample, game, sampling, max_turns=None):
    """The same episode by one call of the engine for each turn."""
    observation, _ = game.reset(seed=seed_of(0, prompt))
    form = ChatFormat(TOKENIZER)
    messages = [{"role": "user", "content": prompt.text[0]["content"] + observation}]
    prompt = Prompt(id=prompt.id, token_ids=form.prompt_ids(messages), text=messages)
    ids, mask, turns = np.zeros(0, np.int32), np.zeros(0, bool), 0
    while True:
        request = Request(prompt=prompt, first_sample=sample, prefix_ids=ids)
        (turn,) = make_engine(model).generate([request], samples_per_prompt=1, sampling=sampling)
        mask = np.append(mask, np.ones(len(turn.token_ids) - len(ids), bool))
        own, ids = turn.token_ids[len(ids) :], turn.token_ids
        if turn.finish == "length" or turns == max_turns:
            return prompt, ids, mask
        observation, _, done, _, _ = game.step(TOKENIZER.decode(own, skip_special_tokens=True))
        turns += 1
        answer = form.next_turn_ids([{"role": "user", "content": observation}])
        if done or len(ids) + len(answer) >= sampling.max_new_tokens:
            return prompt, ids, mask
        ids, mask = np.append(ids, answer).astype(np.int32), np.append(mask, np.zeros(len(answer), bool))


@pytest.mark.parametrize("greedy", [False, True])
def test_episodes_are_those_of_a_loop_over_turns(model, episodes_of, greedy):
    sampling = Sampling(max_new_tokens=120, greedy=greedy)
    engine = episodes_of(model, games.Echo)
    prompts = [prompt_of(number) for number in range(3)]
    found = list(
        engine.generate((Request(prompt=prompt) for prompt in prompts), samples_per_prompt=4, sampling=sampling)
    )
    assert sorted((c.prompt_id, c.sample_index) for c in found) == [(f"p{p}", s) for p in range(3) for s in range(4)]
    assert any(not c.episode.chosen.all() for c in found)
    for completion in found:
        prompt = prompts[int(completion.prompt_id[1:])]
        seen, ids, mask = by_turns(model, prompt, completion.sample_index, games.Echo(), sampling)
        assert completion.episode.prompt.token_ids.tolist() == seen.token_ids.tolist()
        assert completion.token_ids.tolist() == ids.tolist()
        assert completion.loss_mask.tolist() == mask.tolist()


def test_log_probs_of_an_episode_are_those_of_a_plain_pass(model, episodes_of):
    engine = episodes_of(model, games.Echo)
    for completion in engine.generate([Request(prompt=prompt_of(0))], samples_per_prompt=6, sampling=SAMPLING):
        prompt = torch.from_numpy(completion.episode.prompt.token_ids).long()
        ids = torch.cat([prompt, torch.from_numpy(completion.token_ids).long()])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
        expected = log_probs.gather(1, ids[len(prompt) :, None])[:, 0].numpy()
        chosen = completion.loss_mask
        np.testing.assert_allclose(completion.policy_log_probs[chosen], expected[chosen], atol=1e-4)
        np.testing.assert_allclose(completion.behaviour_log_probs[chosen], expected[chosen], atol=1e-4)
        assert (completion.policy_log_probs[~chosen] == 0).all()
        # Rewards of the steps add up under the class's name: a quarter for each turn that came to its end.
        ended = int((completion.token_ids[chosen] == STOP).sum())
        assert completion.episode.rewards == {"Echo": 0.25 * ended}


def test_a_reader_of_a_run_sees_where_turns_end():
    def text_of(mask):
        ids = np.array([*TOKENIZER.encode("ab"), STOP, *TOKENIZER.encode("cd"), STOP], np.int32)
        zeros, mask = np.zeros(len(ids), np.float32), np.array(mask)
        completion = Completion(
            prompt_id="p0",
            sample_index=0,
            token_ids=ids,
            behaviour_log_probs=zeros,
            policy_log_probs=zeros,
            version_spans=((0, 0),),
            finish="stop",
        )
        trajectory = Trajectory(completion=completion, rewards={}, log_ref=zeros, reference_version=0, loss_mask=mask)
        (text,) = group_texts(TOKENIZER, TrajectoryGroup(id="a", prompt=prompt_of(0), trajectories=(trajectory,)))
        return text

    assert text_of([True, True, True, False, False, True]) == "ab<|im_end|>cd<|im_end|>"
    assert text_of([True] * 6) == "abcd"  # a single response has none within it


def test_turns_are_limited(model, episodes_of):
    engine = episodes_of(model, games.Echo, max_turns=1)
    for completion in engine.generate([Request(prompt=prompt_of(1))], samples_per_prompt=4, sampling=SAMPLING):
        assert sum(message["role"] == "user" for message in completion.episode.messages) <= 1


def test_spans_of_versions_go_on_over_turns(model, episodes_of):
    engine, found = episodes_of(model, games.Echo), []
    for completion in engine.generate([Request(prompt=prompt_of(2))], samples_per_prompt=6, sampling=SAMPLING):
        if not found:
            engine.load(make_weights(model, version=7))
        found.append(completion)
    spans = [completion.version_spans for completion in found]
    assert any(len(own) == 2 for own in spans)
    for own in spans:
        assert [version for _, version in own] in ([0], [0, 7], [7])
        assert own[0][0] == 0


def test_a_reset_that_differs_within_a_prompt_costs_the_others(model, episodes_of):
    engine = episodes_of(model, games.Luck)
    found = list(engine.generate([Request(prompt=prompt_of(0))], samples_per_prompt=3, sampling=SAMPLING))
    failures = [completion.episode.failure for completion in found]
    assert sorted(map(bool, failures)) == [False, True, True]
    assert "told this response something else" in max(failures)


def test_episodes_in_a_row_and_a_call_that_is_left_early(model, episodes_of):
    engine = episodes_of(model, games.Echo)
    requests = [Request(prompt=prompt_of(number)) for number in range(4)]
    first = next(iter(engine.generate(requests, samples_per_prompt=2, sampling=SAMPLING)))
    again = list(engine.generate(requests, samples_per_prompt=2, sampling=SAMPLING))
    assert len(again) == 8
    same = next(c for c in again if (c.prompt_id, c.sample_index) == (first.prompt_id, first.sample_index))
    assert same.token_ids.tolist() == first.token_ids.tolist()


def test_there_are_signs_of_life_while_all_wait_for_their_environments(model, tmp_path, episodes_of):
    # Under a pace limit nothing more may start: the requests say None, and the engine has nothing that runs.
    engine, sign, found = episodes_of(model, games.Waits), tmp_path / "sign", []

    def requests():
        yield Request(prompt=replace(prompt_of(0), columns={"sign": str(sign)}))
        while not found:
            yield None

    def between_steps():
        sign.touch()

    for completion in engine.generate(requests(), samples_per_prompt=2, sampling=SAMPLING, between_steps=between_steps):
        found.append(completion)
    assert [completion.episode.failure for completion in found] == ["", ""]


def test_the_seed_of_a_prompt_is_its_own():
    seeds = {seed_of(0, prompt_of(number)) for number in range(100)}
    assert len(seeds) == 100
    assert max(seeds) < 2**32


def test_turns_of_the_other_side_are_not_trained_on(model, episodes_of):
    engine, sides = episodes_of(model, games.Duel), set()
    requests = [Request(prompt=prompt_of(number)) for number in range(4)]
    for completion in engine.generate(requests, samples_per_prompt=2, sampling=SAMPLING):
        side = seed_of(0, completion.episode.prompt) % 2
        turns = [message for message in completion.episode.messages if message["role"] == "assistant"]
        # Turns 0, 2, ... are of side 0: with one turn of the other side nothing was chosen.
        assert completion.loss_mask.any() == (side == 0 or len(turns) > 1)
        assert completion.loss_mask[0] == (side == 0)
        sides.add(side)
    assert sides == {0, 1}


def test_a_row_that_names_no_environment_ends_the_run_and_not_the_searcher_alone(model, tmp_path):
    spec = EnvironmentSpec(classes={"a": games.Guess, "b": games.Guess}, rewards={"a": "Guess", "b": "Guess"})
    environments = Environments(spec, log=tmp_path / "environments.log")
    engine = EpisodeEngine(make_engine(model), lambda: environments, TOKENIZER, seed=0)
    try:
        with pytest.raises(RewardUnusable, match="has environment=None in its row: it must be one of a, b"):
            engine.kind_of(prompt_of(1))
    finally:
        engine.close()
