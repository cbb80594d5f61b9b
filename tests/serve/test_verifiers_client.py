"""verifiers' own TrainClient against the server: the tokens and log-probs of a conversation of two turns reach its trace."""

import asyncio
import importlib.util

import pytest
from builders import tiny_llama
from chat_families import family_tokenizer
from served import LENGTH, make_engine, served

pytest.importorskip("uvicorn", reason="pip install -e '.[dev]' brings it")
if importlib.util.find_spec("verifiers") is None or importlib.util.find_spec("verifiers.v1") is None:
    pytest.skip("verifiers 0.4 is not installed", allow_module_level=True)


async def converse(url, tokenizer):
    import verifiers.v1 as vf
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.graph import prepare_turn

    client = vf.resolve_client(vf.TrainClientConfig(base_url=f"{url}/v1", renderer_model_name=str(tokenizer)))
    data = vf.TaskData(prompt="tool")
    trace = vf.Trace(task=vf.TraceTask(type="Task", data=data), agent=vf.AgentInfo(config=vf.AgentConfig()))
    messages = [vf.UserMessage(content="tool")]
    for word in ("a", "b"):
        turn = prepare_turn(trace, messages)
        response = await client.get_response(
            ChatDialect(), {"model": "tiny"}, vf.SamplingConfig(max_tokens=6), session_id=trace.id, turn=turn
        )
        turn.commit(response)
        messages += [response.message, vf.UserMessage(content=word)]
    await client.close()
    return trace


def test_train_client_gets_its_tokens_and_log_probs(tmp_path):
    tokenizer = family_tokenizer("qwen_2_5")
    tokenizer.save_pretrained(tmp_path)
    model = tiny_llama(0, vocab_size=len(tokenizer), max_position_embeddings=LENGTH)
    with served(make_engine(model), tokenizer=tokenizer) as server:
        trace = asyncio.run(converse(server.url, tmp_path))
        generated = [result.token_ids.tolist() for result in server.driver.finished]
    turns = [node for node in trace.nodes if node.sampled]
    assert [[token for token, own in zip(turn.token_ids, turn.mask) if own] for turn in turns] == generated
    assert [len(turn.logprobs) for turn in turns] == [len(ids) for ids in generated]
    assert all(value <= 0.0 for turn in turns for value in turn.logprobs)
