"""The nodes of a Ray cluster on this machine, which are killed with all their processes and replaced by new ones.

The head has no room for roles; `tba train` runs beside it. Each other node has room for one role, so that a role whose
node is lost can only go on when a node was added. All nodes are at 127.0.0.1 and open to who has the token only.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from chaos_bench.target import is_alive

SHUTDOWN_SECONDS = 30.0
RAY_ADDRESS = ("ray", "ray_current_cluster")


@dataclass
class AddedNode:
    """A node that was added for one that was lost."""

    name: str
    time: float
    """Seconds since 1970 when it was asked for."""
    used: float | None = None
    """Seconds until a role was seen on it; None = none was yet."""
    lost: bool = False


@dataclass
class Nodes:
    """A head and some nodes. Nodes(Path("/tmp/x/ray"), count=3)"""

    folder: Path
    """For the files of Ray. Short, because sockets lie in it."""
    count: int
    added: list[AddedNode] = field(default_factory=list)
    """Nodes that were not there from the start."""
    _error: BaseException | None = None
    """What went wrong when a node was added."""

    def start(self) -> None:
        """Start the cluster; every process of it inherits the environment."""
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_worker_niceness": "0"}
        # No monitor: the memory of this machine, which others use too, is not one node's.
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_memory_monitor_refresh_ms": "0"}
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's name for: every node is 127.0.0.1, on Linux too
        from ray.cluster_utils import Cluster  # reads them when it is imported

        # No hooks for the end: they would take SIGTERM away from the benchmark, and `close` ends all nodes.
        self._cluster: Any = Cluster(shutdown_at_exit=False)
        self._cluster.add_node(num_cpus=0, include_dashboard=False, temp_dir=str(self.folder))
        for _ in range(self.count):
            self._cluster.add_node(num_cpus=1)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def node_of(self, process: psutil.Process) -> Any:
        """The node that a process runs on; None where it is gone, or on no node but the head."""
        try:
            ancestors = {parent.pid for parent in process.parents()}
        except psutil.NoSuchProcess:
            return None
        nodes = list(self._cluster.worker_nodes)
        return next((node for node in nodes if any(p.pid in ancestors for _, p in node.live_processes())), None)

    def kill(self, node: Any) -> None:
        """Kill all processes of a node at once."""
        processes = _processes(node)
        for process in processes:
            _kill(process)
        self._cluster.worker_nodes.remove(node)
        for _, process in node.live_processes():
            process.wait(SHUTDOWN_SECONDS)  # no zombies
        for one in self.added:
            one.lost |= one.name == node.unique_id

    def add(self) -> None:
        """Add a node, in the background."""
        self.added.append(AddedNode(name="", time=time.time()))
        threading.Thread(target=self._add, args=(self.added[-1],), daemon=True, name="add-node").start()

    def look(self, roles: list[psutil.Process]) -> None:
        """See which of the added nodes are used. Raises what went wrong when one was added."""
        if self._error is not None:
            raise self._error
        unused = {one.name: one for one in self.added if one.used is None}
        if not unused:
            return
        for process in roles:
            node = self.node_of(process)
            if node is not None and node.unique_id in unused:
                unused[node.unique_id].used = time.time() - unused[node.unique_id].time

    def unused(self, *, within_seconds: float = math.inf) -> list[AddedNode]:
        """Nodes that were added within a time and have had no role yet, though they are there."""
        first = time.time() - within_seconds
        return [one for one in self.added if one.used is None and not one.lost and one.time > first]

    def close(self) -> None:
        """End all nodes; nothing is left running or on the disk."""
        if not hasattr(self, "_cluster"):
            return
        nodes = self._cluster.list_all_nodes()
        processes = [process for node in nodes for process in _processes(node)]
        for process in processes:
            _kill(process)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while any(is_alive(process) for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # where Ray notes the newest cluster of this machine, which would be looked for in vain
            noted = Path(tempfile.gettempdir(), *RAY_ADDRESS)
            if noted.read_text() == self.address:
                noted.unlink()

    def _add(self, added: AddedNode) -> None:
        try:
            added.name = self._cluster.add_node(wait=False, num_cpus=1).unique_id
        except BaseException as error:
            self._error = error
            raise


def _processes(node: Any) -> list[psutil.Process]:
    """What was started as the node, and all that comes from it."""
    found = []
    for _, process in node.live_processes():
        try:
            root = psutil.Process(process.pid)
            found += [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
