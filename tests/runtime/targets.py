"""Functions that run in child processes of the runtime tests."""

from __future__ import annotations

import os
import time


def echo(link, *, prefix: str) -> None:
    """Sends back what it gets until it gets `end`."""
    while True:
        message = link.receive(timeout_seconds=30.0)
        if message in (None, "end"):
            return
        link.send(f"{prefix}{message}")


class Unreadable:
    """A message that can be pickled but not made again."""

    def __reduce__(self):
        return int, ("not a number",)


class Unsendable:
    """A message that cannot be pickled."""

    def __reduce__(self):
        raise RuntimeError("not this one")


def sends_unreadable(link) -> None:
    for message in ("one", Unreadable(), "two"):
        link.send(message)
    link.receive(timeout_seconds=None)


def sends_unsendable(link) -> None:
    link.send(Unsendable())


def fail(link) -> None:
    raise ValueError("this target always fails")


def deaf(link) -> None:
    """Never listens; ends only by force or with its parent."""
    time.sleep(600)


def stuck(link) -> None:
    """Hours inside one call into C that keeps the interpreter's lock."""
    import re

    link.send("stuck")
    re.match(r"(a+)+$", "a" * 64 + "b")


def parent_with_child(link, *, log: str, child=deaf) -> None:
    """Starts a child of its own, tells its pid, and dies without a word."""
    from pathlib import Path

    from tba.runtime.processes import RoleProcess

    process = RoleProcess("grandchild", child, {}, log=Path(log))
    if child is not deaf:
        process.link.receive(timeout_seconds=30.0)
    link.send(process.pid)
    time.sleep(0.2)
    os._exit(9)


def thread_setting(link) -> None:
    """Tells how many threads it was given, and how many have taken part in a product of matrices."""
    from pathlib import Path

    import torch

    def ticks() -> dict[str, int]:
        found = Path("/proc/self/task").glob("*/stat")
        return {path.parent.name: int(path.read_text().rpartition(")")[2].split()[11]) for path in found}

    matrix, before, gained = torch.rand(1200, 1200), ticks(), [0]
    while sum(gained) < 50:  # half a second of all threads together
        matrix @ matrix
        gained = [count - before.get(thread, 0) for thread, count in ticks().items()]
    # Not in comparison with each other: on busy cores one thread spins while the other waits for its core.
    working = sum(count > 2 for count in gained)
    link.send((os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), working))


def surroundings(link, *, descriptor: int) -> None:
    """Tells what it finds around it."""
    from pathlib import Path

    name = Path("/proc/self/comm").read_text().strip()
    link.send((os.read(descriptor, 100), os.getcwd(), os.environ.get("TBA_TEST_SETTING"), name))


def takes_rollouts_and_dies(link, *, index: int, **_) -> None:
    """Searcher 1 asks for four rollouts and is gone; searcher 0 only listens."""
    if index == 0:
        time.sleep(600)
    link.send(("ask", 4))
    link.receive(timeout_seconds=60.0)


def sends_a_group_and_dies(link, *, index: int, incarnation: str, **_) -> None:
    """Asks for two rollouts, sends the group of the first, and fails."""
    import numpy as np

    from tba.types import Prompt, TrajectoryGroup

    link.send(("ask", 2))
    _, rollouts = link.receive(timeout_seconds=60.0)
    prompt = Prompt(id="p", token_ids=np.array([1], np.int32), text="")
    group_id = f"searcher-0.{incarnation}/0"
    group = TrajectoryGroup(id=group_id, prompt=prompt, trajectories=(), rollout=rollouts[0].number)
    link.send(group)
    raise ValueError("and that was all")


def sends_nonsense(link, *, index: int, **_) -> None:
    """Sends the trainer a message that cannot be read, and goes on as if nothing had been."""
    link.send(Unreadable())
    time.sleep(600)


def sends_its_incarnation(link, *, index: int, incarnation: str, **_) -> None:
    """Sends one group and goes on for ever."""
    import numpy as np

    from tba.types import Prompt, TrajectoryGroup

    prompt = Prompt(id="p", token_ids=np.array([1], np.int32), text="")
    link.send(TrajectoryGroup(id=f"searcher-{index}.{incarnation}/0", prompt=prompt, trajectories=()))
    time.sleep(600)


def publishes(link, *, weights, count: int) -> None:
    """Publishes versions 1 to `count`, each filled with its own number, as fast as it can."""
    import torch

    from tba.runtime.shared_weights import SharedWeights

    buffers = SharedWeights.attach(weights)
    for version in range(1, count + 1):
        buffers.publish({spec.name: torch.full(spec.shape, float(version)) for spec in buffers.layout}, version=version)
    link.receive(timeout_seconds=None)


def tells_weights(link, *, index: int, incarnation: str, connection) -> None:
    """Sends a group for each version that it sees, named after the number that fills it, and shows signs of life."""
    import numpy as np

    from tba.config import RuntimeConfig
    from tba.runtime.channels import Stopped
    from tba.runtime.connection import TrainerConnection
    from tba.types import Prompt, TrajectoryGroup

    found = TrainerConnection(link, connection, RuntimeConfig(), index=index, stock=1)
    prompt, seen = Prompt(id="p", token_ids=np.array([1], np.int32), text=""), -1
    try:
        while True:
            found.handle_messages()
            if found.weights.newest_version != seen:
                weights = found.weights.fetch()
                seen = weights.version
                value = int(weights.tensors["w"][0])
                group_id = f"searcher-{index}.{incarnation}/{weights.version}-{value}"
                found.send(TrajectoryGroup(id=group_id, prompt=prompt, trajectories=()))
            time.sleep(0.01)
    except Stopped:
        return


def numbered_group(index: int, incarnation: str, number: int):
    import numpy as np

    from tba.types import Prompt, TrajectoryGroup

    prompt = Prompt(id="p", token_ids=np.array([1], np.int32), text="")
    return TrajectoryGroup(id=f"searcher-{index}.{incarnation}/{number}", prompt=prompt, trajectories=())


def looks_into_the_replica(link, *, index: int, incarnation: str, path: str, **_) -> None:
    """Sends group 0 and, when it is told that it is stored, a group whose number is 10 more than there are rows."""
    import sqlite3

    link.send(numbered_group(index, incarnation, 0))
    while link.receive(timeout_seconds=30.0)[0] != "stored":
        pass
    with sqlite3.connect(path) as database:
        (count,) = database.execute("SELECT COUNT(*) FROM groups").fetchone()
    link.send(numbered_group(index, incarnation, 10 + count))
    link.receive(timeout_seconds=30.0)


def tells_what_it_was_told(link, **_) -> None:
    """Sends back the first message that it gets."""
    link.send(link.receive(timeout_seconds=30.0))
    link.receive(timeout_seconds=None)


def waits(link, **_) -> None:
    from tba.runtime.links import STOP

    while not link.closed and link.receive(timeout_seconds=0.1) != STOP:
        pass


def tells_a_variable(link, *, name: str, **_) -> None:
    link.send((os.environ.get(name, "not set"),))


def starts_a_role(link) -> None:
    """Tells its own number, that of its role and that of the process that it was forked from, and waits."""
    import psutil

    from tba.runtime.processes import RoleProcess
    from tba.runtime.role_process import OWN_SERVER

    had = OWN_SERVER in os.environ
    role = RoleProcess("below", surroundings_of_a_role, {}, log=None, forked=True)
    link.send((had, role.link.receive(timeout_seconds=60.0), os.getpid(), role.pid, psutil.Process(role.pid).ppid()))
    link.receive(timeout_seconds=None)


def surroundings_of_a_role(link) -> None:
    """Tells which variables of a fork server it has, and waits."""
    link.send([name for name in os.environ if "FORK_SERVER" in name])
    link.receive(timeout_seconds=None)


def beats_no_more(link, *, counters) -> None:
    """A trainer with searchers, of which it has replaced three, that has made a step and now hangs."""
    from tba.runtime.counters import SharedCounters, SharedMemory

    row = SharedCounters(SharedMemory.attach(counters)).trainer
    row["searchers"], row["made"], row["replaced"], row["beats"] = 1, 1, 3, 7
    time.sleep(600)


def ends_at_once(link) -> None:
    """Has nothing to do."""


def dies(link) -> None:
    os.kill(os.getpid(), 9)
