"""What runs on a Ray cluster cost against runs on one machine.

    python benchmarks/scaling.py runtimes --pairs 3 --steps 150     # trained responses per second, local and Ray in turns
    python benchmarks/scaling.py weights --searchers 4              # a 100M-parameter bf16 model from trainer to searchers
    python benchmarks/scaling.py groups --searchers 2               # groups per second from searchers to the trainer

runtimes: the quickstart with one searcher under runtime.kind=local and runtime.kind=ray, in turns, with the same seed in a
pair; the rate is that of the optimizer steps after the first 30, so that starts do not count. weights: from the moment the
trainer publishes until every searcher has a checked copy of its own, through slots and Ray's object store; beside it the
official code's way, in which every parameter goes as a pickled fp32 tensor through a broadcast between CPU processes.
groups: searchers that do nothing but send groups of 8 responses of 64 tokens, through their actors and the supervisor, to a
trainer that does nothing but acknowledge them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

WARM_UP_STEPS = 30
SHAPE = {"layers": 12, "hidden": 768, "intermediate": 3072, "vocabulary": 32_000}


def responses_per_second(kind: str, seed: int, steps: int) -> float:
    """Of one run's steps after the first WARM_UP_STEPS."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"runtime.kind={kind}", f"seed={seed}", f"train.max_steps={steps}", f"output={folder}", "name=run",
            "evaluate.every=0", "evaluate.num_prompts=1", "observe.progress=false", "train.keep_checkpoints=0",
        ]  # fmt: skip
        command = [sys.executable, "-m", "tba", "train", "configs/quickstart.yaml", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = {record["step"]: record["seconds"] for record in records if "loss" in record}
    last = max(seconds)
    return 128 * (last - WARM_UP_STEPS) / (seconds[last] - seconds[WARM_UP_STEPS])


def compare_runtimes(arguments: argparse.Namespace) -> None:
    ratios = []
    for pair in range(arguments.pairs):
        order = ("local", "ray") if pair % 2 == 0 else ("ray", "local")
        rates = {kind: responses_per_second(kind, pair, arguments.steps) for kind in order}
        ratios.append(rates["ray"] / rates["local"])
        print(
            f"seed {pair}: local {rates['local']:.0f}, ray {rates['ray']:.0f} responses/s: {ratios[-1]:.3f}", flush=True
        )
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    print(f"ray / local: {statistics.mean(ratios):.3f} +- {error:.3f} (must be at least 0.85)")


def parameters() -> dict[str, torch.Tensor]:
    """Those of a Llama of 110M parameters, bf16."""
    hidden, inner = SHAPE["hidden"], SHAPE["intermediate"]
    tensors = {"embed": (SHAPE["vocabulary"], hidden)}
    for layer in range(SHAPE["layers"]):
        tensors |= {f"{layer}.{name}": (hidden, hidden) for name in ("q", "k", "v", "o")}
        tensors |= {f"{layer}.gate": (inner, hidden), f"{layer}.up": (inner, hidden), f"{layer}.norm": (hidden,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in tensors.items()}


class Searcher:
    """What receives weights on a searcher's node, and the searcher that fetches them, in one actor."""

    def __init__(self, ends: bytes) -> None:
        from tba.runtime.cluster.weights import WeightMirror, unpickled_ends
        from tba.runtime.weight_slots import WeightSlots

        torch.set_num_threads(1)
        found = unpickled_ends(ends)
        self.mirror = WeightMirror("trainer", found)
        self.slots = WeightSlots.attach(self.mirror.ends(found).weights)
        self.fetched = -1

    def take_weights(self, offer: Any, data: list[Any]) -> bool:
        import ray

        self.mirror.take(offer, ray.get(data[0]) if data else None)
        if data:
            self.fetched = self.slots.fetch().version  # copied and checked, as a searcher does it
        return True

    def version(self) -> int:
        return self.fetched


def through_the_object_store(tensors: dict[str, torch.Tensor], searchers: int, times: int) -> list[float]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    from tba.runtime.board import MemoryHandle
    from tba.runtime.cluster.weights import WeightRelay
    from tba.runtime.links import EndsHandle, pickled
    from tba.runtime.weight_slots import WeightSlots

    ray.init("local", include_dashboard=False, num_cpus=searchers, log_to_driver=False, logging_level="warning")
    slots = WeightSlots.create(tensors, torch.bfloat16)
    ends = EndsHandle(board=MemoryHandle(path="", num_bytes=0), weights=slots.handle(), references=None)
    make: Any = ray.remote(num_cpus=1)
    actors = [make(Searcher).remote(pickled(ends)) for _ in range(searchers)]
    ray.get([actor.version.remote() for actor in actors])
    relay = WeightRelay("trainer", ends)
    relay.set_receivers({str(index): actor.take_weights.remote for index, actor in enumerate(actors)})
    seconds = []
    for version in range(times + 1):
        started = time.perf_counter()
        slots.publish(tensors, version=version)
        while min(ray.get([actor.version.remote() for actor in actors])) < version:
            time.sleep(0.01)  # or asking would take the cores from those who work
        seconds.append(time.perf_counter() - started)
    relay.close()
    ray.shutdown()
    return seconds[1:]  # the first one also sets memory up


def receives(rank: int, world: int, port: int, times: int) -> None:
    """A process of the official way: a copy of each parameter arrives as a pickled fp32 tensor."""
    import torch.distributed as distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    own = parameters()
    for _ in range(times + 1):
        started = time.perf_counter()
        for name, tensor in own.items():
            box = [tensor.float() if rank == 0 else None]
            distributed.broadcast_object_list(box, src=0)
            if rank:
                received = box[0]
                assert received is not None
                own[name].copy_(received)
        distributed.barrier()
        if rank == 0:
            print(time.perf_counter() - started, flush=True)
    distributed.destroy_process_group()


def the_official_way(searchers: int, times: int) -> list[float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = searchers + 1
    code = "import sys; sys.path.insert(0, sys.argv[1]); import scaling; scaling.receives(*map(int, sys.argv[2:]))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).parent), str(rank), str(world), str(port), str(times)],
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(world)
    ]
    output, _ = processes[0].communicate()
    for process in processes:
        if process.wait():
            raise SystemExit(f"a process of the broadcast ended with {process.returncode}.")
    return [float(line) for line in output.split()][1:]


def sends_groups(link: Any, *, index: int, incarnation: str, ends: bytes) -> None:
    """The target of a searcher that does nothing else, as fast as it is let."""
    import pickle

    import numpy as np

    from tba.config import RuntimeConfig
    from tba.runtime.channels import Stopped
    from tba.runtime.ends import LocalSearcherEnds
    from tba.types import Completion, Prompt, Trajectory, TrajectoryGroup

    found = LocalSearcherEnds(link, pickle.loads(ends), RuntimeConfig(), index=index, stock=1)
    prompt = Prompt(id="p", token_ids=np.arange(32, dtype=np.int32), text="x" * 100)
    floats = np.zeros(64, np.float32)
    completion = Completion(
        prompt_id="p",
        sample_index=0,
        token_ids=np.arange(64, dtype=np.int32),
        behaviour_log_probs=floats,
        policy_log_probs=floats,
        version_spans=((0, 0),),
        finish="stop",
    )
    trajectory = Trajectory(
        completion=completion, rewards={"r": 1.0}, log_ref=floats, reference_version=0, loss_mask=np.ones(64, bool)
    )
    number = 0
    try:
        while True:
            group_id = f"searcher-{index}.{incarnation}/{number}"
            found.sender.send(TrajectoryGroup(id=group_id, prompt=prompt, trajectories=(trajectory,) * 8))
            found.handle_messages()
            number += 1
    except Stopped:
        return


def measure_groups(arguments: argparse.Namespace) -> None:
    import threading

    import numpy as np

    from tba.config import load_config
    from tba.launch.supervise import starters
    from tba.observe.claim import Holder
    from tba.runtime.board import Board
    from tba.runtime.leases import VisitLedger
    from tba.runtime.links import Link
    from tba.runtime.local import LocalRuntime
    from tba.runtime.seats import Host
    from tba.runtime.supervisor import Supervisor
    from tba.types import Weights

    config = load_config(None, [f"runtime.kind={arguments.kind}", f"search.num_searchers={arguments.searchers}"])
    tensors = {"w": torch.zeros(16)}
    with tempfile.TemporaryDirectory() as folder:
        logs, board = Path(folder), Board.create()
        with starters(config, board, logs) as start:
            supervisor = Supervisor(config.runtime, board, logs=logs, start_searcher=start.searcher)
            thread = threading.Thread(target=supervisor.run)
            thread.start()
            runtime = LocalRuntime(
                config.runtime,
                Host(link=Link(supervisor.trainer_connection), board=board, owner=Holder.of_this_process()),
                num_searchers=arguments.searchers,
                tensors=tensors,
                dtype=torch.float32,
                canary=lambda weights: np.zeros(64),
                ledger=VisitLedger(10, seed=0, shuffle=False),
            )
            runtime.publish(Weights(version=0, tensors=tensors))
            runtime.start_searchers(sends_groups, {})
            count, started, seen = 0, 0.0, set[str]()
            while not started or time.perf_counter() - started < arguments.seconds:
                groups = runtime.drain()
                runtime.acknowledge([group.id for group in groups])
                if started:
                    count += len(groups)
                seen |= {group.id.partition("/")[0] for group in groups}
                if not started and len(seen) == arguments.searchers:
                    started = time.perf_counter()
                time.sleep(0.001)
            rate = count / arguments.seconds
            print(f"{arguments.kind}, {arguments.searchers} searchers: {rate:.0f} groups/s of 8 x 64 tokens")
            runtime.stop()
            thread.join()
            supervisor.close()


def in_words(seconds: list[float]) -> str:
    return f"median {statistics.median(seconds):.2f} s ({', '.join(f'{each:.2f}' for each in seconds)})"


def compare_weights(arguments: argparse.Namespace) -> None:
    tensors = parameters()
    count = sum(tensor.numel() for tensor in tensors.values())
    print(
        f"{count / 1e6:.0f}M parameters, {2 * count / 1e6:.0f} MB in bf16, to {arguments.searchers} searchers",
        flush=True,
    )
    ours = through_the_object_store(tensors, arguments.searchers, arguments.times)
    print(
        f"slots and object store: median {statistics.median(ours):.2f} s ({', '.join(f'{s:.2f}' for s in ours)})",
        flush=True,
    )
    theirs = the_official_way(arguments.searchers, arguments.times)
    print(
        f"fp32, pickled, broadcast: median {statistics.median(theirs):.2f} s ({', '.join(f'{s:.2f}' for s in theirs)})"
    )
    print(f"{statistics.median(theirs) / statistics.median(ours):.1f} times as fast (must be at least 5)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runtimes = commands.add_parser("runtimes")
    runtimes.set_defaults(function=compare_runtimes)
    runtimes.add_argument("--pairs", type=int, default=3)
    runtimes.add_argument("--steps", type=int, default=150)
    groups = commands.add_parser("groups")
    groups.set_defaults(function=measure_groups)
    groups.add_argument("--kind", choices=["local", "ray"], default="ray")
    groups.add_argument("--searchers", type=int, default=2)
    groups.add_argument("--seconds", type=float, default=10.0)
    weights = commands.add_parser("weights")
    weights.set_defaults(function=compare_weights)
    weights.add_argument("--searchers", type=int, default=4)
    weights.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
