"""A real server in a thread, with a tiny model: what the tests of the routes talk to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from builders import tiny_llama, tiny_tokenizer

from tba.engine.native.engine import NativeEngine
from tba.serve.driver import Driver
from tba.serve.sessions import Sessions

STOP = 2
LENGTH = 640
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{{ extra or '' }}"


class RecordingDriver(Driver):
    """Keeps what the engine gave."""

    def __init__(self, *given, **options):
        self.finished = []
        super().__init__(*given, **options)

    def _finish(self, job, result):
        self.finished.append(result)
        super()._finish(job, result)


def make_model(seed=0):
    return tiny_llama(seed, max_position_embeddings=LENGTH, num_hidden_layers=1)


def make_engine(model=None, *, slots=4, seed=0):
    model = make_model() if model is None else model
    return NativeEngine(model, stop_ids=[STOP], seed=seed, slots=slots, max_length=LENGTH, dtype=torch.float32)


class Served:
    """A server that runs."""

    def __init__(self, service, url: str) -> None:
        self.service, self.driver, self.url = service, service.driver, url
        self.tokenizer = service.tokenizer


@contextmanager
def served(engine=None, *, token=None, max_waiting=8, tokenizer=None, most_sessions=4) -> Iterator[Served]:
    from tba.serve.server import make_server, open_socket  # of an extra
    from tba.serve.service import Service

    if tokenizer is None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
    driver = RecordingDriver(make_engine() if engine is None else engine, max_waiting=max_waiting)
    sessions = Sessions(most=most_sessions, idle_seconds=100.0)
    service = Service(driver, tokenizer, sessions, name="tiny", token=token)
    address = open_socket("127.0.0.1", 0)
    server = make_server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address]})
    thread.start()
    try:
        yield Served(service, f"http://127.0.0.1:{address.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(60)
        assert not driver._thread.is_alive()


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
