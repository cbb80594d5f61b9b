"""Memory of each process of a run over time: it should stay flat.

    python benchmarks/memory.py --minutes 60 train.max_steps=1000000 train.responses_per_step=16 search.num_searchers=1

The quickstart with these settings, stopped after so many minutes. Resident memory counts what a role shares with the
process that it was forked from; in brackets is its own memory, which rises with every page that it writes to.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from tba.observe.run_folder import RunFolder

MARKS = 6
"""Lines of the table; what comes before the first is the start, and does not count for the slope."""


class Sample(NamedTuple):
    """Sample(seconds=600.2, step=6012, role="searcher-0", resident=391.2, own=104.7), in MB"""

    seconds: float
    step: int
    role: str
    resident: float
    own: float


def samples(run: psutil.Popen, folder: RunFolder, *, seconds: float, every: float) -> Iterator[Sample]:
    """What each process of a run holds, until the time is over or the run is."""
    began = time.monotonic()
    while run.poll() is None and (now := time.monotonic() - began) < seconds + every:
        step = folder.last_step()["step"]
        for process in [run, *run.children(recursive=True)]:
            try:
                role, memory = "tba train" if process == run else process.name(), process.memory_full_info()
            except psutil.Error:  # it has just ended
                continue
            yield Sample(now, step, role, memory.rss / 1e6, memory.uss / 1e6)
        time.sleep(every)


def table(found: Sequence[Sample], *, seconds: float) -> str:
    """Resident (own) MB of each role at equal times, and how resident memory rises on the straight line nearest to it."""
    roles = list(dict.fromkeys(sample.role for sample in found))
    lines = [["minutes", "step", *roles], ["---"] * (2 + len(roles))]
    for mark in (seconds * (number + 1) / MARKS for number in range(MARKS)):
        look = min((sample.seconds for sample in found if sample.seconds >= mark), default=None)
        at = {sample.role: sample for sample in found if sample.seconds == look}
        cells = [f"{at[role].resident:.1f} ({at[role].own:.1f})" if role in at else "" for role in roles]
        lines.append([f"{mark / 60:g}", str(max((own.step for own in at.values()), default="")), *cells])
    later = [[own for own in found if own.role == role and own.seconds >= seconds / MARKS] for role in roles]
    rise = [np.polyfit([own.step / 1000 for own in of], [own.resident for own in of], 1)[0] for of in later]
    lines.append(["per 1,000 steps", "", *(f"{megabytes:+.2f}" for megabytes in rise)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="section.key=value")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two looks")
    parser.add_argument("--out", type=Path, default=Path("memory.csv"), help="file for every look")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, given.out.open("w", buffering=1, newline="") as file:
        command = ["tba", "train", "configs/quickstart.yaml", *given.settings, f"output={folder}", "name=run"]
        run = psutil.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)
        found, seconds = [], 60 * given.minutes
        for sample in samples(run, RunFolder(Path(folder) / "run"), seconds=seconds, every=given.every):
            found.append(sample)
            csv.writer(file).writerow(sample)
        run.terminate()  # not Ctrl-C, which is ignored where this runs in the background of a script
        run.wait()
    print(table(found, seconds=seconds))


if __name__ == "__main__":
    main()
