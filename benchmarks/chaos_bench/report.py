"""What became of a run under faults: told, and held against what must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos_bench.accounting import (
    Disturbance,
    Note,
    Recovery,
    account,
    in_words,
    read_notes,
    read_rows,
    searcher_recoveries,
    undisturbed,
)
from chaos_bench.cluster import ClusterInjector, missing_in_replica, use_in_words
from chaos_bench.drive import Chaos
from chaos_bench.inject import Done
from chaos_bench.plan import CLUSTER_RARE, mix, shortfalls
from chaos_bench.target import read_json

ROLES = ("trainer", "supervisor")
CLUSTER_ROLES = (*ROLES, "trainer's node", "searcher's node", "interrupted run")
"""Whose end shows in the optimizer steps, as Injector.recoveries names them."""


def disturbances(done: Sequence[Done], recoveries: Sequence[Recovery]) -> list[Disturbance]:
    """What else was the matter while a searcher came back."""
    found = []
    for one in done:
        who = one.who if one.who.startswith("searcher-") else "run"
        found.append(Disturbance(who=who, first=one.time, last=one.time + one.fault.seconds))
    for kill in recoveries:
        last = float("inf") if kill.seconds is None else kill.killed + kill.seconds
        found.append(Disturbance(who="run", first=kill.killed, last=last))
    return found


def write_events(path: Path, done: Sequence[Done], recoveries: Sequence[Recovery]) -> None:
    """What happened when, a line each in the order of time: whom a fault was done to, and from when on a role was back."""
    events = [(one.time, f"{one.fault.kind} {one.who} for {one.fault.seconds:.1f} s") for one in done]
    events += [(one.killed + one.seconds, f"{one.who} is back") for one in recoveries if one.seconds is not None]
    first = min((when for when, _ in events), default=0.0)
    path.write_text("".join(f"{when - first:8.2f} {what}\n" for when, what in sorted(events)))


def report(chaos: Chaos, folder: Path, *, minutes: float, quick: bool) -> list[str]:
    """Print what happened; returns what must not be."""
    injector, target = chaos.injector, chaos.target
    kinds = [one.fault.kind for one in injector.done]
    left_out = f"; left out: {mix(fault.kind for fault in injector.left_out)}" if injector.left_out else ""
    print(f"faults: {len(kinds)} in {chaos.seconds / 60:.1f} minutes ({mix(kinds)}{left_out})")
    cluster = injector if isinstance(injector, ClusterInjector) else None
    if injector.disk is not None:
        print(f"what was filled: {injector.disk.name}")
    if not (target.folder / "replay.sqlite").exists():
        return ["there is no durable replay"]
    rows, marks = read_rows(target.folder / "replay.sqlite")
    notes = read_notes(folder / "acknowledged")
    found = account(notes, rows, marks)
    print(
        f"groups: {found.acknowledged:,} acknowledged, {found.stored:,} stored ({found.unacknowledged:,} of them not "
        f"acknowledged), {len(found.evicted):,} evicted, {len(found.lost)} lost, {len(found.changed)} changed, "
        f"{len(found.twice)} stored twice; sent by {len(marks)} searcher processes"
    )
    kills = [(int(one.who[9:]), one.time) for one in injector.done if one.fault.kind == "kill_searcher"]
    # A trainer that has lost its disk writes all groups again, with new times.
    searchers = searcher_recoveries(kills, rows) if cluster is None else cluster.notes.recoveries(injector.done)
    alone = undisturbed(searchers, disturbances(injector.done, injector.recoveries))
    print(f"time to recover, searcher (to its first group): {in_words(searchers)}; undisturbed: {in_words(alone)}")
    write_events(folder / "events.txt", injector.done, [*searchers, *injector.recoveries])
    for role in ROLES if cluster is None else CLUSTER_ROLES:
        recoveries = [one for one in injector.recoveries if one.who == role]
        print(f"time to recover, {role} (to the next optimizer step): {in_words(recoveries)}")
    aside = len(list(target.folder.glob("checkpoints/corrupt-*")))
    print(
        f"steps made again: {chaos.watch.made_again}; checkpoints set aside as corrupt: {aside}; "
        f"the run ended by itself: {len(chaos.own_ends)} times; processes left running: {len(target.left_running)}"
    )
    for how, count in Counter(chaos.own_ends).items():
        print(f"  {count} x {how}")
    wrong = [
        *([f"the run was done {chaos.not_reached} faults too early: raise --steps"] if chaos.not_reached else []),
        *([] if quick or cluster is not None else shortfalls(kinds, minutes=minutes)),
        *([] if cluster is None else cluster_faults(cluster, chaos, notes)),
        *([f"{len(found.lost)} groups lost, such as {found.lost[0]}"] if found.lost else []),
        *([f"{len(found.changed)} groups changed, such as {found.changed[0]}"] if found.changed else []),
        *([f"{len(found.twice)} groups stored twice, such as {found.twice[0]}"] if found.twice else []),
        *(["no group was acknowledged"] if not found.acknowledged else []),
        *([f"left running: {', '.join(target.left_running)}"] if target.left_running else []),
    ]
    # A searcher killed in the last moments of a smoke test, which then ends, cannot come back.
    never = [one for one in [*searchers, *injector.recoveries] if one.seconds is None]
    return wrong if quick or not never else [*wrong, f"{len(never)} kills without a recovery"]


def cluster_faults(injector: ClusterInjector, chaos: Chaos, notes: Sequence[Note]) -> list[str]:
    """Print what there is to tell of a cluster; returns what must not be."""
    target, nodes = injector.target, injector.target.nodes
    missing, summary = missing_in_replica(target.folder, notes), read_json(target.folder / "summary.json")
    print(use_in_words(nodes))
    print(f"the run's end: {summary.get('outcome')} at step {summary.get('steps')}; held-out accuracy then:", end=" ")
    print(summary.get("final", {}).get("accuracy", "not evaluated"))
    kinds, unused = {one.fault.kind for one in injector.done}, nodes.unused()
    return [
        *(f"there was no {kind}" for kind in CLUSTER_RARE if kind not in kinds),
        *([f"{len(unused)} nodes that were added were never used"] if unused else []),
        *([f"{len(missing)} acknowledged groups are not in the second copy: {missing[0]}"] if missing else []),
        *([] if summary.get("outcome") in ("finished", "interrupted") else ["the run did not get to its end"]),
    ]
