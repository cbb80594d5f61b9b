"""The web server around a service: an address, uvicorn, and its end."""

from __future__ import annotations

import socket
import sys

import uvicorn

from tba.serve.service import Service

SHUTDOWN_SECONDS = 5
"""Time that responses under way have to finish when the server is stopped."""
SWITCH_SECONDS = 0.0005
"""Longest turn of a thread while others wait: with Python's own 5 ms each decode step could wait that long for the web."""


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 = any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        why = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise OSError(f"--host {host} --port {port}: {why}. Give another --port; 0 takes any that is free.") from None


def make_server(service: Service) -> uvicorn.Server:
    config = uvicorn.Config(
        service.app(),
        lifespan="on",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(config)


def run_server(service: Service, address: socket.socket) -> None:
    """Serve until the process is asked to stop."""
    sys.setswitchinterval(SWITCH_SECONDS)
    make_server(service).run(sockets=[address])
