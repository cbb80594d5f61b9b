"""Agents that play episodes by calls to the served policy: tokens, log-probs, and what costs an episode."""

import agent_loops
import numpy as np
import pytest
import torch
from builders import tiny_llama
from chat_families import family_tokenizer

from tba.engine.native.engine import NativeEngine
from tba.models.weights import make_weights
from tba.tasks.environments.chat_format import ChatFormat
from tba.tasks.environments.host import EnvironmentSpec
from tba.tasks.environments.workers import Environments
from tba.tasks.rewards.pool import finished_group
from tba.types import Prompt, Request, Sampling

for name in ("openai", "uvicorn"):
    pytest.importorskip(name, reason="pip install -e '.[dev]' brings it")

TOKENIZER = family_tokenizer("qwen_2_5")
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SAMPLING = Sampling(max_new_tokens=160)


@pytest.fixture(scope="module")
def model():
    model = tiny_llama(0, vocab_size=len(TOKENIZER), max_position_embeddings=1400)
    with torch.no_grad():  # turns of some ten tokens: the end-of-turn token is likely
        model.lm_head.weight[STOP] = 3.0 * model.lm_head.weight[STOP]
    return model


@pytest.fixture
def agents_of(model, tmp_path):
    from tba.serve.agents import AgentEngine  # of an extra

    made = []

    def make(agent, **options):
        spec = EnvironmentSpec(classes={}, rewards={}, agent=agent, timeout_seconds=float("inf"))
        engine = NativeEngine(model, stop_ids=[STOP], seed=0, slots=6, max_length=1400)
        made.append(
            AgentEngine(
                engine,
                lambda: Environments(spec, log=tmp_path / "agents.log"),
                TOKENIZER,
                **{"seed": 0, "reward": "agent", "timeout_seconds": 60.0, **options},
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompt_of(number):
    messages = [{"role": "user", "content": f"Problem {number}."}]
    return Prompt(id=f"p{number}", token_ids=ChatFormat(TOKENIZER).prompt_ids(messages), text=messages)


def episodes(engine, *, prompts=1, samples=3, sampling=SAMPLING):
    requests = [Request(prompt=prompt_of(number)) for number in range(prompts)]
    found = engine.generate(requests, samples_per_prompt=samples, sampling=sampling)
    return sorted(found, key=lambda completion: (completion.prompt_id, completion.sample_index))


def test_log_probs_of_an_episode_are_those_of_a_plain_pass(model, agents_of):
    found = episodes(agents_of(agent_loops.talk), prompts=2, samples=4)
    assert [(own.prompt_id, own.sample_index) for own in found] == [(f"p{p}", s) for p in range(2) for s in range(4)]
    assert any(len(own.episode.messages) == 5 for own in found)
    for own in found:
        assert own.episode.failure == ""
        assert own.episode.rewards == {"agent": 3.5}
        prompt = torch.from_numpy(own.episode.prompt.token_ids).long()
        assert prompt.tolist() == prompt_of(int(own.prompt_id[1:])).token_ids.tolist()
        ids = torch.cat([prompt, torch.from_numpy(own.token_ids).long()])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
        expected, chosen = log_probs.gather(1, ids[len(prompt) :, None])[:, 0].numpy(), own.loss_mask
        np.testing.assert_allclose(own.policy_log_probs[chosen], expected[chosen], atol=1e-4)
        np.testing.assert_allclose(own.behaviour_log_probs[chosen], expected[chosen], atol=1e-4)
        assert (own.policy_log_probs[~chosen] == 0).all()
        # What the agent said stands where the mask is 0, and only there.
        said = TOKENIZER.decode(own.token_ids[~chosen])
        turns = sum(message["role"] == "assistant" for message in own.episode.messages)
        assert said.count(agent_loops.SAID) == turns - 1
        assert agent_loops.SAID not in TOKENIZER.decode(own.token_ids[chosen])
        assert own.version_spans == ((0, 0),)


def test_a_run_of_agents_repeats(agents_of):
    first, again = (episodes(agents_of(agent_loops.talk), prompts=2) for _ in range(2))
    assert [own.token_ids.tolist() for own in first] == [own.token_ids.tolist() for own in again]
    assert len({own.token_ids.tobytes() for own in first}) > 1


def test_the_runs_sampling_counts_whatever_an_agent_asks_for(agents_of):
    first, second = episodes(agents_of(agent_loops.talk), samples=2, sampling=Sampling(max_new_tokens=160, greedy=True))
    assert first.token_ids.tolist() == second.token_ids.tolist()


def test_an_async_agent_without_a_reward_leaves_it_to_reward_functions(agents_of):
    (found,) = episodes(agents_of(agent_loops.talk_async), samples=1)
    assert (found.episode.failure, found.episode.rewards) == ("", {})
    (message,) = found.episode.messages
    assert message["content"] == TOKENIZER.decode(found.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("max_turns", [None, 1])
def test_an_episode_has_one_budget_of_tokens_and_of_turns(agents_of, max_turns):
    for own in episodes(agents_of(agent_loops.forever, max_turns=max_turns)):
        assert own.episode.failure == ""
        assert own.finish == "length"
        assert len(own.token_ids) <= 160
        # It ends with what the policy chose: an answer that left no room is dropped.
        assert own.loss_mask[-1]
        turns = sum(message["role"] == "assistant" for message in own.episode.messages)
        assert own.episode.rewards == {"agent": float(turns)}
        assert max_turns is None or turns <= 2


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("forget", "call 2 of the agent does not go on from call 1: its message 1, of the role assistant"),
        ("fail", "KeyError: 'no such door'"),
        ("silent", "made no call"),
        ("sides", "of the agent"),
        ("hang", "worked 1 s without a call"),
    ],
)
def test_what_an_agent_does_wrong_costs_its_episode(agents_of, agent, words):
    limit = 1.0 if agent == "hang" else 60.0
    for own in episodes(agents_of(getattr(agent_loops, agent), timeout_seconds=limit), samples=2):
        assert words in own.episode.failure


def test_agents_of_a_group_have_one_prompt(agents_of):
    found = episodes(agents_of(agent_loops.own_words))
    failures = [own.episode.failure for own in found]
    assert sorted(map(bool, failures)) == [False, True, True]
    assert "another prompt" in max(failures)
    kept = next(own for own in found if not own.episode.failure)
    group = finished_group(TOKENIZER, prompt_of(0), found)
    assert group.prompt.token_ids.tolist() == kept.episode.prompt.token_ids.tolist()


def test_a_call_of_generate_that_is_left_early_and_an_evaluation_within_another(agents_of, model):
    engine = agents_of(agent_loops.talk)
    requests = [Request(prompt=prompt_of(number)) for number in range(3)]
    found = []
    for completion in engine.generate(requests, samples_per_prompt=2, sampling=SAMPLING):
        if not found:
            inner = episodes(engine.clone_for_evaluation(), samples=2)
            assert [own.episode.failure for own in inner] == ["", ""]
            engine.load(make_weights(model, version=7))
        found.append(completion)
        if len(found) == 3:
            break
    assert [own.episode.failure for own in found] == [""] * 3
    again = episodes(engine, prompts=3, samples=2)
    assert [own.episode.failure for own in again] == [""] * 6
    assert all(own.version == 7 for own in again)
