"""Nothing lost: a run whose processes are killed, stopped and slowed down, whose disk fills up and whose checkpoints rot.

    python benchmarks/chaos.py --minutes 10 --seed 0
    python benchmarks/chaos.py --minutes 1 --quick          # a smoke test: no quiet run, no accuracy
    python benchmarks/chaos.py --cluster --minutes 30       # on a Ray cluster, whose nodes are killed too

The quickstart run with two searchers and a checkpoint every 10 steps, in processes of its own. Faults come by a plan that
the seed decides (chaos_bench/plan.py). What searchers were told is stored is compared with the durable replay by id and
checksum; then the run comes to its end undisturbed, and its accuracy on 2,000 held-out problems is compared with that of a
quiet run of as many optimizer steps. The exit status is 1 where something must not be as it is. Figures are for two cores.

The run folder is on a small tmpfs that is filled; where none can be mounted (not root), file sizes are limited instead.
A run whose supervisor was killed, or that ended with an error while its disk was full, is resumed with `--resume`, as its
user would.

With `--cluster` the roles are on the nodes of a Ray cluster on this machine, under replay.durability=node (docs/scaling.md):
processes are killed and suspended, a searcher's node is killed, the trainer's node is killed and the run folder deleted with
it, and a lost node is replaced by a new one some seconds later. The disk is not filled. Without `--steps` the run is asked
to save and end after the faults. The quiet run is on the local runtime.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from chaos_bench.cluster import SETTINGS as CLUSTER_SETTINGS
from chaos_bench.cluster import ClusterInjector, ClusterTarget, FirstNotes
from chaos_bench.disk import make_disk
from chaos_bench.drive import Chaos
from chaos_bench.inject import Injector
from chaos_bench.nodes import Nodes
from chaos_bench.plan import make_plan
from chaos_bench.quiet import calibrated_steps, compare_with_quiet_run
from chaos_bench.report import report
from chaos_bench.target import StepWatch, Stuck, Target

SETTINGS = [
    *("search.num_searchers=2", "train.checkpoint_every=10", "train.keep_checkpoints=3", "replay.durability=process"),
    *("observe.progress=false", "evaluate.every=100", "observe.healthy_checkpoint_every=50"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long there are faults")
    parser.add_argument("--seed", type=int, default=0, help="of the plan; the runs have the seed 0")
    parser.add_argument("--steps", type=int, help="optimizer steps of both runs; by default as many as fit the minutes")
    parser.add_argument("--quick", action="store_true", help="end after the faults, without a quiet run")
    parser.add_argument("--cluster", action="store_true", help="on a Ray cluster, with the loss of nodes")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of that cluster besides its head")
    parser.add_argument("--folder", type=Path, help="a new folder for everything, which stays")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of all that is started here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was mounted and started is ended by `finally`
    run = run_cluster if arguments.cluster else run_all
    if arguments.folder is None:
        with tempfile.TemporaryDirectory(prefix="tba-chaos-") as folder:
            sys.exit(run(arguments, Path(folder)))
    arguments.folder.mkdir(parents=True)
    sys.exit(run(arguments, arguments.folder))


def run_all(arguments: argparse.Namespace, folder: Path) -> int:
    """The exit status: 1 where something must not be as it is."""
    for name in ("disk", "acknowledged", "quiet_acknowledged"):
        (folder / name).mkdir()

    def make_target(name: str, steps: int, place: Path, notes: str) -> Target:
        settings = [*SETTINGS, f"train.max_steps={steps}"]
        return Target(place / name, settings, acknowledged=folder / notes, log=folder / f"{name}.log")

    disk = make_disk(folder / "disk")
    targets: list[Target] = []
    wrong: list[str] = []
    try:
        steps = arguments.steps or 1_000_000
        if not arguments.quick and arguments.steps is None:
            targets.append(make_target("calibration", 1_000_000, folder, "quiet_acknowledged"))
            steps = calibrated_steps(targets[-1], minutes=arguments.minutes)
        print(
            f"{arguments.minutes:g} minutes, seed {arguments.seed}, {steps} steps, {os.cpu_count()} cores", flush=True
        )
        target = make_target("run", steps, folder / "disk", "acknowledged")
        targets.append(target)
        watch = StepWatch(target.folder / "metrics.jsonl")
        chaos = Chaos(target=target, injector=Injector(target, watch, disk), watch=watch, steps=steps)
        try:
            chaos.run(make_plan(seed=arguments.seed, minutes=arguments.minutes))
            chaos.finish(stop=arguments.quick)
        except Stuck as error:
            wrong.append(f"{error}\n{target.last_words()}")
            target.end()
        chaos.injector.end()
        wrong += report(chaos, folder, minutes=arguments.minutes, quick=arguments.quick)
        if not arguments.quick and target.finished(steps):
            targets.append(make_target("quiet", steps, folder, "quiet_acknowledged"))
            wrong += compare_with_quiet_run(target, targets[-1], steps=steps)
    except Stuck as error:
        wrong.append(str(error))
    finally:
        for one in targets:
            one.end()
        if arguments.folder is not None:
            shutil.copytree(folder / "disk", folder / "copy", ignore=shutil.ignore_patterns("filler"))
        disk.close()
    return verdict(wrong)


def run_cluster(arguments: argparse.Namespace, folder: Path) -> int:
    """The exit status of `--cluster`."""
    for name in ("acknowledged", "quiet_acknowledged"):
        (folder / name).mkdir()
    os.environ["TBA_ACKNOWLEDGED_LOG"] = str(folder / "acknowledged")  # every process of the cluster inherits it
    nodes, targets, wrong = Nodes(folder / "ray", count=arguments.nodes), list[Target](), list[str]()
    steps = arguments.steps or 1_000_000
    stop = arguments.quick or arguments.steps is None
    print(f"{arguments.minutes:g} minutes, seed {arguments.seed}, a head and {arguments.nodes} nodes on", end=" ")
    print(f"{os.cpu_count()} cores", flush=True)
    try:
        nodes.start()
        settings = [*CLUSTER_SETTINGS, f"runtime.address={nodes.address}", f"train.max_steps={steps}"]
        target = ClusterTarget(
            folder / "run", settings, acknowledged=folder / "acknowledged", log=folder / "run.log", nodes=nodes
        )
        targets.append(target)
        watch = StepWatch(target.folder / "metrics.jsonl")
        injector = ClusterInjector(target, watch, None, notes=FirstNotes(folder / "acknowledged"))
        chaos = Chaos(target=target, injector=injector, watch=watch, steps=steps)
        try:
            chaos.run(make_plan(seed=arguments.seed, minutes=arguments.minutes, cluster=True))
            chaos.finish(stop=stop)
        except Stuck as error:
            wrong.append(f"{error}\n{target.last_words()}")
            target.end()
        injector.end()
        wrong += report(chaos, folder, minutes=arguments.minutes, quick=arguments.quick)
        made = steps if not stop else watch.step
        if not arguments.quick and target.finished(made):
            print(f"so far {'something' if wrong else 'nothing'} is wrong; the quiet run follows", flush=True)
            nodes.close()  # it has the machine for itself
            local = [*CLUSTER_SETTINGS, "runtime.kind=local", "replay.durability=process", f"train.max_steps={steps}"]
            quiet = Target(
                folder / "quiet", local, acknowledged=folder / "quiet_acknowledged", log=folder / "quiet.log"
            )
            targets.append(quiet)
            wrong += compare_with_quiet_run(target, quiet, steps=made, stop=stop)
    except Stuck as error:
        wrong.append(str(error))
    finally:
        for one in targets:
            one.end()
        nodes.close()
    return verdict(wrong)


def verdict(wrong: Sequence[str]) -> int:
    """The exit status, and the words for it."""
    for what in wrong:
        print(f"MUST NOT BE: {what}")
    print("failed" if wrong else "all as it must be")
    return int(bool(wrong))


if __name__ == "__main__":
    main()
