"""Throughput of a served engine over HTTP, against the same engine's own in the same process.

    python benchmarks/serve.py                       # 64 streams, the shipped model, responses of 128 tokens
    python benchmarks/serve.py --streams 16 --tokens 32

Rounds alternate: the engine alone, HTTP with whole responses, HTTP with streams of events. Clients are one process of plain
sockets, so that they cost little beside the server. The best round of each kind counts, as other programs disturb the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import Connection

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

PROMPT = "12 + 34 ="


# --- the clients: a process without torch ------------------------------------------------------------------------------


async def stream(port: int, count: int, body: bytes) -> int:
    """One client: requests one after the other on one connection -> tokens that came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    tokens = 0
    for _ in range(count):
        writer.write(head.encode() + body)
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in headers, headers
        if b"content-length:" in headers:
            length = int(headers.partition(b"content-length:")[2].split(b"\r\n")[0])
            answer = await reader.readexactly(length)
        else:  # chunks of events; the last but one has the usage
            answer = (await reader.readuntil(b"0\r\n\r\n")).rpartition(b"data: [DONE]")[0].rpartition(b"data: ")[2]
            answer = answer.split(b"\n")[0]
        tokens += json.loads(answer)["usage"]["completion_tokens"]
    writer.close()
    return tokens


def run_clients(commands: Connection) -> None:
    """Answer each (port, streams, requests of each, body) with tokens and seconds."""

    async def all_streams(port: int, streams: int, count: int, body: bytes) -> int:
        return sum(await asyncio.gather(*(stream(port, count, body) for _ in range(streams))))

    while (command := commands.recv()) is not None:
        began = time.perf_counter()
        tokens = asyncio.run(all_streams(*command))
        commands.send((tokens, time.perf_counter() - began))


# --- the server ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tba:arithmetic")
    parser.add_argument("--streams", type=int, default=64, help="clients, and slots of the engine")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each response")
    parser.add_argument("--requests", type=int, default=4, help="requests of each client in a round")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    commands, others = multiprocessing.get_context("spawn").Pipe()
    clients = multiprocessing.get_context("spawn").Process(target=run_clients, args=(others,), daemon=True)
    clients.start()

    from tba.config import GenerateConfig, ModelConfig
    from tba.engine.make_engine import make_engine
    from tba.models.load import load_model, use_cpu
    from tba.serve.bodies import Asked
    from tba.serve.driver import Driver
    from tba.serve.server import SWITCH_SECONDS, make_server, open_socket
    from tba.serve.service import Service
    from tba.serve.sessions import Sessions
    from tba.types import Sampling

    use_cpu(1)
    loaded = load_model(ModelConfig(path=given.model))
    slots = GenerateConfig(slots=given.streams)
    options = {"seed": 0, "max_length": loaded.context}
    alone = make_engine(loaded.model, loaded.tokenizer, slots, **options)
    driver = Driver(make_engine(loaded.model, loaded.tokenizer, slots, **options), max_waiting=given.streams)
    service = Service(driver, loaded.tokenizer, Sessions(most=1, idle_seconds=1.0), name="model")
    address = open_socket("127.0.0.1", 0)
    port = address.getsockname()[1]
    server = make_server(service)
    sys.setswitchinterval(SWITCH_SECONDS)
    web = threading.Thread(target=server.run, kwargs={"sockets": [address]})
    web.start()

    sampling = Sampling(max_new_tokens=given.tokens, min_new_tokens=given.tokens)
    ids = loaded.tokenizer(PROMPT)["input_ids"]

    def engine_alone(round_: int) -> tuple[int, float]:
        wanted = Asked(
            prompts=[ids] * given.streams * given.requests,
            num_samples=1,
            sampling=sampling,
            seed=None,
            stop=[],
            stop_ids=[],
        )
        began = time.perf_counter()
        found = alone.generate(wanted.requests(str(round_)), samples_per_prompt=1, sampling=sampling)
        return sum(len(completion.token_ids) for completion in found), time.perf_counter() - began

    def over_http(streams: bool) -> tuple[int, float]:
        body = {"prompt": PROMPT, "max_tokens": given.tokens, "min_tokens": given.tokens, "stream": streams}
        body |= {"stream_options": {"include_usage": True}} if streams else {}
        commands.send((port, given.streams, given.requests, json.dumps(body).encode()))
        return commands.recv()

    best = {"engine": 0.0, "http": 0.0, "http, events": 0.0}
    for round_ in range(given.rounds):
        for kind, measured in (
            ("engine", lambda: engine_alone(round_)),  # noqa: B023
            ("http", lambda: over_http(False)),
            ("http, events", lambda: over_http(True)),
        ):
            tokens, seconds = measured()
            assert tokens == given.streams * given.requests * given.tokens, tokens
            best[kind] = max(best[kind], tokens / seconds)
            print(f"round {round_} {kind:>12}: {tokens / seconds:8.0f} tokens/s", flush=True)
    for kind, speed in best.items():
        print(f"best {kind:>12}: {speed:8.0f} tokens/s, {100 * speed / best['engine']:.0f}% of the engine's own")
    commands.send(None)
    server.should_exit = True
    web.join()


if __name__ == "__main__":
    main()
