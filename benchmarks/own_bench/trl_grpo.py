"""TRL's GRPO on a problem of the bench, as its user would run it: same model, data, rewards, steps and responses per step.

Needs the extra `benchmark`. Everything that the problem does not need is TRL's default (learning rate 1e-6 falling linearly,
no KL term, its loss). The trained model is saved and evaluated by `tba evaluate`, like every other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

from own_bench.problem import Problem
from own_bench.runs import CHECKOUT, commit_of_checkout, environment, read_lines, shown_scores

PROMPTS, SAMPLES = 16, 8
"""Per step, as tba's defaults have it."""


def run_trl(
    problems: Sequence[Problem],
    rates: Sequence[str],
    seeds: Sequence[int],
    *,
    iterations: Sequence[int] = (1,),
    folder: Path,
    out: Path,
    jobs: int,
) -> None:
    """One line of `out` for each problem, rate, number of updates a batch, and seed that has none yet."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {(line["problem"], line["setting"], line["seed"]) for line in read_lines(out)}
    todo = [
        job
        for job in product(seeds, rates, iterations, problems)
        if (job[3].name, setting_of(job[1], job[2]), job[0]) not in done
    ]
    commit, lock = commit_of_checkout(), Lock()

    def do(job: tuple[int, str, int, Problem]) -> None:
        seed, rate, updates, problem = job
        line = run_one(problem, rate, updates, seed, folder=folder, output=out.with_suffix(".runs").resolve())
        with lock:
            with out.open("a") as file:
                file.write(json.dumps(line | {"commit": commit}) + "\n")
            print(f"{problem.name} {line['setting']} {seed}: {shown_scores(line)}, {line['seconds']:.0f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(do, todo))


def setting_of(rate: str, updates: int) -> str:
    """trl_3e-4, or trl_3e-4_x2 where each batch is trained twice."""
    return f"trl_{rate}" if updates == 1 else f"trl_{rate}_x{updates}"


def run_one(problem: Problem, rate: str, updates: int, seed: int, *, folder: Path, output: Path) -> dict[str, Any]:
    """Train and evaluate in processes of their own. A batch is trained `updates` times (TRL's num_iterations); the number
    of batches is the problem's."""
    output = output / f"{problem.name}-{setting_of(rate, updates)}-seed{seed}"
    shutil.rmtree(output, ignore_errors=True)
    paths = os.pathsep.join([str(CHECKOUT / "benchmarks"), environment()["PYTHONPATH"]])
    env = {**environment(), "PYTHONPATH": paths}
    arguments = [str((folder / problem.name).resolve()), str(output), str(seed), str(problem.steps), rate, str(updates)]
    started = time.perf_counter()
    _run([sys.executable, "-m", "own_bench.trl_grpo", *arguments], env)
    seconds = time.perf_counter() - started
    evaluate = [sys.executable, "-m", "tba", "evaluate", str(output / "model"), *problem.overrides(folder)]
    scores = json.loads(_run(evaluate, env))
    shutil.rmtree(output)
    description = json.loads((folder / problem.name / "problem.json").read_text())
    start = description["start"]
    names = (("", problem.metric), ("true_", problem.true_metric))
    return {
        "problem": problem.name,
        "setting": setting_of(rate, updates),
        "model": description["model"],
        "overrides": [],
        "seed": seed,
        "metric": problem.metric,
        "true_metric": problem.true_metric,
        **{f"{prefix}start": start.get(name) if name else None for prefix, name in names},
        **{f"{prefix}final": scores.get(name) if name else None for prefix, name in names},
        "final_scores": scores,
        "seconds": seconds,
        "steps": problem.steps,
        "responses_generated": problem.steps * PROMPTS * SAMPLES,
        "responses_trained": updates * problem.steps * PROMPTS * SAMPLES,
        "lag": {"mean": 0.0, "max": 0},
        "collapse": None,
    }


def _run(command: Sequence[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=CHECKOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def train(folder: Path, output: Path, *, seed: int, steps: int, rate: float | None, updates: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from tba.models.cpu import use_cpu

    use_cpu(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as tba does: both without oneDNN where it costs time
    problem = json.loads((folder / "problem.json").read_text())
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = rows * max(1, -(-PROMPTS * steps // len(rows)))  # a step takes 16 rows, also where there is one prompt only
    weights = {name: weight for name, weight in problem["rewards"].items() if weight}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    chosen: dict[str, Any] = {} if rate is None else {"learning_rate": rate}
    config = GRPOConfig(
        output_dir=str(output / "trl"), seed=seed, max_steps=updates * steps, num_iterations=updates,
        use_cpu=True, bf16=False,
        per_device_train_batch_size=PROMPTS * SAMPLES, num_generations=SAMPLES,
        max_completion_length=max_new_tokens(problem), reward_weights=list(weights.values()),
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1000, disable_tqdm=True, **chosen,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=load_rewards(folder / "rewards.py", list(weights)),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")


def max_new_tokens(problem: dict[str, Any]) -> int:
    (found,) = (setting.partition("=")[2] for setting in problem["settings"] if "max_new_tokens" in setting)
    return int(found)


def load_rewards(path: Path, names: list[str]) -> list[Any]:
    spec = importlib.util.spec_from_file_location("rewards", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [getattr(module, name) for name in names]


if __name__ == "__main__":
    FOLDER, OUTPUT, SEED, STEPS, RATE, UPDATES = sys.argv[1:]
    train(
        Path(FOLDER),
        Path(OUTPUT),
        seed=int(SEED),
        steps=int(STEPS),
        rate=None if RATE == "default" else float(RATE),
        updates=int(UPDATES),
    )
