"""Joining a Ray cluster, or starting a private one, so that only holders of its token can reach it.

Any client that reaches a Ray port can run code there. A private cluster is bound to loopback, has a token of its own, no
dashboard, and sends no usage statistics.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from tba.config import ConfigError, RuntimeConfig

logger = logging.getLogger("tba")

NAMESPACE = "tba"


@contextmanager
def cluster(config: RuntimeConfig, *, address: str | None = None) -> Iterator[str]:
    """Be part of the Ray cluster that a config names, or that this process was placed on; yields its address."""
    address = address or config.address
    if address is not None:
        has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
        has_token = has_token or os.path.isfile(os.path.expanduser("~/.ray/auth_token"))
        if os.environ.get("RAY_AUTH_MODE") != "token" or not has_token:
            raise ConfigError(
                f"runtime.address={address}: a cluster is joined with a token only: any client that reaches its ports can "
                "run code there. Start every node with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN (`ray get-auth-token "
                "--generate` makes one), and set both here too."
            )
    # Before Ray is imported, which reads them then.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # it would leave out lines of what the trainer writes
    os.environ.setdefault("RAY_worker_niceness", "0")  # roles are not what should give way to others
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray's name for: the one node is 127.0.0.1, so that nothing listens on any other address, on Linux too.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "runtime.kind=ray needs the package `ray`: pip install 'tba-rl[ray]', or choose runtime.kind=local."
        ) from None
    try:
        if address is None:
            # `local`, or Ray would join one that it finds on this machine.
            ray.init("local", include_dashboard=False, namespace=NAMESPACE, logging_level=logging.WARNING)
        else:
            ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"runtime.address={address}: the Ray cluster cannot be joined: {error}") from None
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
