"""Tools in the chat route, as OpenAI's own client sees them: the shipped model calls the calculator."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from served import served

from tba.config import ModelConfig
from tba.engine.make_engine import stop_ids_of
from tba.engine.native.engine import NativeEngine
from tba.models.load import load_model

httpx, openai, _ = (
    pytest.importorskip(name, reason="pip install -e '.[dev]' brings it") for name in ("httpx", "openai", "uvicorn")
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": SCHEMA, "strict": True}}]
ASKED = [{"role": "user", "content": "What is 347 * 86?"}]


@pytest.fixture(scope="module")
def loaded():
    return load_model(ModelConfig(path="tba:tools", device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def server(loaded):
    stops = stop_ids_of(loaded.model, loaded.tokenizer)
    engine = NativeEngine(loaded.model, stop_ids=stops, seed=0, slots=16, max_length=loaded.context)
    with served(engine, tokenizer=loaded.tokenizer, max_waiting=64) as found:
        yield found


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client, messages=ASKED, **options):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 40, "seed": 1, **options}
    )


def test_calls_are_parsed_whole_and_in_streams(client):
    whole = ask(client, n=32)
    called = {choice.index: choice for choice in whole.choices if choice.finish_reason == "tool_calls"}
    assert 0 < len(called) < 32
    for choice in whole.choices:
        assert bool(choice.message.tool_calls) == (choice.index in called)
        for call in choice.message.tool_calls or ():
            assert call.function.name == "multiply"
            assert set(json.loads(call.function.arguments)) == {"a", "b"}
            assert choice.message.content is None
    ids = [call.id for choice in called.values() for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids)
    streamed = {
        part.index: part for chunk in ask(client, n=32, stream=True) for part in chunk.choices if part.finish_reason
    }
    for choice in whole.choices:
        part = streamed[choice.index]
        assert part.finish_reason == choice.finish_reason
        arguments = [call.function.arguments for call in choice.message.tool_calls or ()]
        assert [call.function.arguments for call in part.delta.tool_calls or ()] == arguments
        assert [call.index for call in part.delta.tool_calls or ()] == list(range(len(arguments)))
        assert part.delta.content == choice.message.content


def test_without_tools_a_call_is_text(client):
    for options in ({"tools": None}, {"tool_choice": "none"}):
        assert all(choice.message.tool_calls is None for choice in ask(client, n=8, **options).choices)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tool_choice", "required", "'none' or 'auto'"),
        ("tools", [{"type": "function", "function": {}}], "Field required"),
        ("tools", [{"type": "web_search"}], "'function'"),
    ],
)
def test_tools_that_cannot_be_kept_are_refused(server, field, value, words):
    body = {"messages": ASKED, "tools": TOOLS, field: value}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, field)
    assert words in found.json()["error"]["message"]


def test_a_session_with_tools_is_one_trajectory_of_the_tokens_as_generated(server, client, loaded):
    web = httpx.Client(base_url=server.url)
    for seed in range(40):
        key = web.post("/rl/start_session").json()["api_key"]
        agent, messages, turns = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0), ASKED, 0
        while turns < 3:
            message = ask(agent, messages, seed=seed, extra_body={"return_token_ids": True}).choices[0].message
            turns += 1
            if not message.tool_calls:
                break
            results = [{"role": "tool", "tool_call_id": call.id, "content": "29842"} for call in message.tool_calls]
            messages = [*messages, message, *results]
        (found,) = web.post("/rl/end_session", headers={"Authorization": f"Bearer {key}"}).json()["trajectories"]
        assert len(found["turns"]) == turns
        if turns > 1:
            break
    assert turns > 1
    mask = np.array(found["loss_mask"], bool)
    tokens = np.array(found["token_ids"])
    assert "29842" in loaded.tokenizer.decode(tokens[~mask])
    ids = torch.tensor([found["prompt_ids"] + found["token_ids"]])
    with torch.no_grad():
        log_probs = torch.log_softmax(loaded.model(ids).logits[0, len(found["prompt_ids"]) - 1 : -1], -1)
    expected = log_probs.gather(1, ids[0, len(found["prompt_ids"]) :, None])[:, 0].numpy()
    own = np.array([value if value is not None else np.nan for value in found["log_probs"]])
    np.testing.assert_allclose(own[mask], expected[mask], atol=1e-4)
    assert np.isnan(own[~mask]).all()
