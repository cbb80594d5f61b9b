"""Agents for tests: each speaks to the served policy in its own way."""

import asyncio
import time

import openai

SAID = "Go on."


def ask(client, messages, **options):
    return client.chat.completions.create(model="gpt-5", messages=messages, **options)


def talk(base_url, api_key, messages, seed, turns=3):
    """Some turns, with fields in the messages that only a client has."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    for turn in range(turns):
        found = ask(client, messages, temperature=0.2, stream=turn == 1)
        if turn == 1:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in found)
            message = {"role": "assistant", "content": text, "refusal": None}
        else:
            message = found.choices[0].message
        messages = [*messages, message, {"role": "user", "content": f"{SAID} {seed % 10}"}]
    return {"turns": float(turns), "again": 0.5}


async def talk_async(base_url, api_key, prompt):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="gpt-5", messages=prompt)


def forever(base_url, api_key, messages):
    """Goes on as long as it is answered, which no budget allows."""
    client, count = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0), 0
    while True:
        choice = ask(client, messages).choices[0]
        if choice.finish_reason == "length" and not choice.message.content:
            return float(count)
        count += 1
        messages = [*messages, choice.message, {"role": "user", "content": SAID}]


def hang(**given):
    talk(given["base_url"], given["api_key"], given["messages"], 0, turns=1)
    time.sleep(3600)


def forget(base_url, api_key, messages):
    """Writes its history anew."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    ask(client, messages)
    ask(client, [*messages, {"role": "assistant", "content": "A summary."}, {"role": "user", "content": SAID}])


def fail(base_url, api_key, messages):
    talk(base_url, api_key, messages, 0, turns=1)
    raise KeyError("no such door")


def silent():
    return 1.0


def sides(base_url, api_key, messages):
    """Two calls side by side."""

    async def both():
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            calls = [client.chat.completions.create(model="gpt-5", messages=messages) for _ in range(2)]
            await asyncio.gather(*calls)

    asyncio.run(both())


def own_words(base_url, api_key, messages):
    """A first prompt that no seed repeats."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    ask(client, [{"role": "user", "content": str(time.perf_counter_ns())}])
