"""TRL's GRPO on a problem of the bench, as its user would run it: same model, data, rewards, steps and responses per step.

Needs the extra `benchmark`. Everything that the problem does not need is TRL's default (learning rate 1e-6 falling linearly,
no KL term, its loss). The trained model is saved and evaluated by `tba evaluate`, like every other.

With budgets (so many seconds, or steps) one run serves them all: at a constant rate, on all cores, its weights are saved at
the end of the first step at which a budget is used up. The seconds are those of training, from the first generation on;
those of saving do not count.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

from own_bench.budgets import ANCHOR, Budget
from own_bench.problem import Problem
from own_bench.runs import (
    CHECKOUT,
    call,
    commit_of_checkout,
    environment,
    evaluation,
    read_lines,
    scores_at_ends,
    shown_scores,
)

PROMPTS, SAMPLES = 16, 8
"""Per step, as tba's defaults have it; a problem may have fewer (train.responses_per_step)."""


def run_trl(
    problems: Sequence[Problem],
    rates: Sequence[str],
    seeds: Sequence[int],
    *,
    iterations: Sequence[int] = (1,),
    budgets: Sequence[Budget] = (),
    folder: Path,
    out: Path,
    jobs: int,
) -> None:
    """One line of `out` for each problem, rate, number of updates a batch, budget, and seed that has none yet."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {(line["problem"], line["setting"], line["seed"], line.get("budget")) for line in read_lines(out)}
    labels = [budget.label for budget in budgets] or [None]
    todo = [
        (seed, rate, updates, problem, missing)
        for seed, rate, updates, problem in product(seeds, rates, iterations, problems)
        if (missing := [it for it in labels if (problem.name, setting_of(rate, updates), seed, it) not in done])
    ]
    commit, lock = commit_of_checkout(), Lock()

    def do(job: tuple[int, str, int, Problem, list[str | None]]) -> None:
        seed, rate, updates, problem, missing = job
        asked = [budget for budget in budgets if budget.label in missing]
        output = out.with_suffix(".runs").resolve()
        for line in run_one(problem, rate, updates, seed, budgets=asked, folder=folder, output=output):
            with lock:
                with out.open("a") as file:
                    file.write(json.dumps(line | {"commit": commit}) + "\n")
                words = f"{shown_scores(line)}, {line['steps']} steps, {line['seconds']:.0f} s"
                print(f"{problem.name} {line['setting']} {seed}: {words}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(do, todo))


def setting_of(rate: str, updates: int) -> str:
    """trl_3e-4, or trl_3e-4_x2 where each batch is trained twice."""
    return f"{ANCHOR}{rate}" if updates == 1 else f"{ANCHOR}{rate}_x{updates}"


def run_one(
    problem: Problem,
    rate: str,
    updates: int,
    seed: int,
    *,
    budgets: Sequence[Budget] = (),
    folder: Path,
    output: Path,
) -> Iterator[dict[str, Any]]:
    """Train and evaluate in processes of their own; a line for each budget, or for the problem's number of batches. A batch
    is trained `updates` times (TRL's num_iterations)."""
    output = output / f"{problem.name}-{setting_of(rate, updates)}-seed{seed}"
    shutil.rmtree(output, ignore_errors=True)
    own = environment(threads=len(os.sched_getaffinity(0))) if budgets else environment()
    own["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT / "benchmarks"), own["PYTHONPATH"]])
    asked = [json.dumps([[budget.amount, budget.unit] for budget in budgets])]
    arguments = [str((folder / problem.name).resolve()), str(output), str(seed), str(problem.steps), rate, str(updates)]
    started = time.perf_counter()
    _run([sys.executable, "-m", "own_bench.trl_grpo", *arguments, *asked], own)
    seconds = time.perf_counter() - started
    description = json.loads((folder / problem.name / "problem.json").read_text())
    responses = prompts_per_step(description) * SAMPLES
    saved = read_lines(output / SAVED) or [{"path": "model", "seconds": seconds, "steps": updates * problem.steps}]
    for found in saved:
        scores = json.loads(_run(evaluation(problem, output / found["path"], folder, seed=seed), environment()))
        yield {
            "problem": problem.name,
            "setting": setting_of(rate, updates),
            "model": description["model"],
            "overrides": [],
            "seed": seed,
            **({"budget": found["budget"]} if "budget" in found else {}),
            **scores_at_ends(problem, description["start"], scores),
            "seconds": found["seconds"],
            "steps": found["steps"] // updates,
            "responses_generated": found["steps"] // updates * responses,
            "responses_trained": found["steps"] * responses,
            "lag": {"mean": 0.0, "max": 0},
            "collapse": None,
        }
    shutil.rmtree(output)


def _run(command: Sequence[str], env: dict[str, str]) -> str:
    done = call(command, env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


SAVED = "saved.jsonl"
"""What was saved of a run with budgets: {"budget": "60 s", "path": "model-60-s", "seconds": 71.2, "steps": 2}"""
MANY_STEPS = 1_000_000
"""Steps of a run that its budgets end."""


class SaveAtBudgets:
    """What a TrainerCallback does: save the model when a budget is used up, and stop after the last one."""

    def __init__(
        self,
        budgets: Sequence[Budget],
        save: Callable[[Path], None],
        output: Path,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._left = list(budgets)
        self._save, self._output, self._clock = save, output, clock
        self._began = 0.0

    def begins(self) -> None:
        self._began = self._clock()

    def step_ends(self, steps: int) -> bool:
        """Returns whether all budgets are used up. The time of saving does not count."""
        now = self._clock()
        seconds = now - self._began
        for budget in [it for it in self._left if {"seconds": seconds, "steps": steps}[it.unit] >= it.amount]:
            path = f"model-{budget.label.replace(' ', '-')}"
            self._save(self._output / path)
            with (self._output / SAVED).open("a") as file:
                line = {"budget": budget.label, "path": path, "seconds": seconds, "steps": steps}
                file.write(json.dumps(line) + "\n")
            self._left.remove(budget)
        self._began += self._clock() - now
        return not self._left


def train(
    folder: Path,
    output: Path,
    *,
    seed: int,
    steps: int,
    rate: float | None,
    updates: int,
    budgets: Sequence[Budget] = (),
) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tba.models.load import use_cpu

    use_cpu(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as tba does: both without oneDNN where it costs time
    problem = json.loads((folder / "problem.json").read_text())
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    prompts = prompts_per_step(problem)
    rows = rows * max(1, -(-prompts * steps // len(rows)))  # a step takes 16 rows, also where there is one prompt only
    weights = {name: weight for name, weight in problem["rewards"].items() if weight}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    chosen: dict[str, Any] = {} if rate is None else {"learning_rate": rate}
    if budgets:  # none of them is the end of a schedule
        steps = MANY_STEPS
        chosen |= {"lr_scheduler_type": "constant", "beta": 0.0}
    config = GRPOConfig(
        output_dir=str(output / "trl"), seed=seed, max_steps=updates * steps, num_iterations=updates,
        use_cpu=True, bf16=False,
        per_device_train_batch_size=prompts * SAMPLES, num_generations=SAMPLES,
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

    def save(path: Path) -> None:
        trainer.model.save_pretrained(path)
        tokenizer.save_pretrained(path)

    saving = SaveAtBudgets(budgets, save, output)

    class Saves(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saving.begins()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if saving.step_ends(state.global_step):
                control.should_training_stop = True

    if budgets:
        output.mkdir(parents=True, exist_ok=True)
        trainer.add_callback(Saves())
    trainer.train()
    if not budgets:
        save(output / "model")


def prompts_per_step(problem: dict[str, Any]) -> int:
    """As the problem's settings have it, with SAMPLES of each."""
    found = [setting.partition("=")[2] for setting in problem["settings"] if "responses_per_step" in setting]
    return int(found[0]) // SAMPLES if found else PROMPTS


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
    FOLDER, OUTPUT, SEED, STEPS, RATE, UPDATES, BUDGETS = sys.argv[1:]
    train(
        Path(FOLDER),
        Path(OUTPUT),
        seed=int(SEED),
        steps=int(STEPS),
        rate=None if RATE == "default" else float(RATE),
        updates=int(UPDATES),
        budgets=[Budget(amount, unit) for amount, unit in json.loads(BUDGETS)],
    )
