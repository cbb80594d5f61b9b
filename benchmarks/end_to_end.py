"""Responses trained per wall second, and seconds to 60% held-out accuracy: tba against TRL's GRPO, on two cores.

    pip install -e '.[benchmark]' && python benchmarks/end_to_end.py                 # about 25 minutes: 3 seeds
    python benchmarks/end_to_end.py --seeds 1 --steps 60                             # speed only, 3 minutes
    python benchmarks/end_to_end.py --seeds 1 --steps 200 --evaluate-every 20 --out curves.json

Both train the shipped start model on `arithmetic`: 16 prompts x 8 samples a step, temperature 1, at most 64 new tokens,
learning rate 2e-4, AdamW, clipping at 1. tba runs one trainer and one searcher process of one thread each, with m = 1,
every trained response newly generated and trained once (no deduplication). TRL runs GRPOTrainer
(loss_type="grpo", beta 0) with one and with two threads; its better one counts. Start-up is left out of both clocks;
TRL's stops while it evaluates, while tba's searcher evaluates beside the running trainer. Each run is a process of its
own; runs follow one another. `--out` keeps every run with its curve of (seconds, accuracy).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from own_bench.runs import commit_of_checkout

PROMPTS, SAMPLES, MAX_NEW_TOKENS, LEARNING_RATE = 16, 8, 64, 2e-4
TARGET = 0.60
KINDS = {"tba, 1 + 1 processes": ("tba", 1), "trl, 1 thread": ("trl", 1), "trl, 2 threads": ("trl", 2)}
"""What is measured: the side, and its number of threads for each process."""


def run_tba(seed: int, steps: int, evaluate_every: int) -> dict[str, Any]:
    """Train asynchronously, and read speed and curve from the run folder."""
    from tba.config import load_config
    from tba.run import train

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            None,
            [
                f"seed={seed}", f"output={folder}", "name=run", f"train.max_steps={steps}",
                f"train.responses_per_step={PROMPTS * SAMPLES}", f"train.samples_per_prompt={SAMPLES}",
                f"train.learning_rate={LEARNING_RATE}", f"generate.max_new_tokens={MAX_NEW_TOKENS}",
                "replay.on_policy_probability=1", "replay.max_replay_ratio=1",
                "replay.deduplicate=false", f"evaluate.every={evaluate_every}", "observe.progress=false",
            ],
        )  # fmt: skip
        summary = train(config)
        records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    name = "eval/arithmetic/accuracy"
    curve = [(record["seconds"], record[name]) for record in records if name in record]
    return {
        "responses_per_second": summary["responses_trained"] / summary["seconds"],
        "curve": curve,
        "lag": summary["lag"]["mean"],
    }


def run_trl(seed: int, steps: int, evaluate_every: int) -> dict[str, Any]:
    """GRPOTrainer with a callback that stops the clock while it evaluates."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tba.config import ModelConfig, TaskConfig
    from tba.models.load import use_cpu
    from tba.models.paths import resolve_path
    from tba.tasks.registry import make_task

    use_cpu(int(os.environ["OMP_NUM_THREADS"]))  # as tba does: both without oneDNN where it costs time
    path = resolve_path(ModelConfig().path)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    task = make_task(TaskConfig(), tokenizer, max_prompt_tokens=256)
    rows = [{"prompt": prompt.text, "answer": prompt.columns["answer"]} for prompt in task.prompts("train")]
    held_out = task.prompts("held_out")[:500]

    def exact_match(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [float(text.rpartition("####")[2].strip() == want) for text, want in zip(completions, answer)]

    def accuracy(model: torch.nn.Module) -> float:
        inputs = tokenizer([prompt.text for prompt in held_out], return_tensors="pt", padding=True)
        with torch.no_grad():
            tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(exact_match(texts, [prompt.columns["answer"] for prompt in held_out])) / len(held_out)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.curve: list[tuple[float, float]] = []
            self.paused = 0.0

        def evaluate(self, model: torch.nn.Module) -> None:
            before = time.perf_counter()
            model.eval()
            self.curve.append((before - self.started - self.paused, accuracy(model)))
            model.train()
            self.paused += time.perf_counter() - before

        def on_train_begin(self, args: object, state: object, control: object, model=None, **_: object) -> None:  # noqa: ANN001
            self.started = time.perf_counter()
            self.evaluate(model)

        def on_step_end(self, args: object, state, control: object, model=None, **_: object) -> None:  # noqa: ANN001
            self.stopped = time.perf_counter() - self.started - self.paused
            if state.global_step % evaluate_every == 0:
                self.evaluate(model)

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, seed=seed, max_steps=steps, learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", per_device_train_batch_size=PROMPTS * SAMPLES, num_generations=SAMPLES,
            max_completion_length=MAX_NEW_TOKENS, temperature=1.0, beta=0.0, loss_type="grpo", max_grad_norm=1.0,
            bf16=False, gradient_checkpointing=False, report_to="none", logging_steps=1000, save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            reward_funcs=exact_match,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    return {
        "responses_per_second": steps * PROMPTS * SAMPLES / clock.stopped,
        "curve": clock.curve,
        "lag": 0.0,
    }


def seconds_to(curve: Sequence[tuple[float, float]], target: float = TARGET) -> float | None:
    """When the accuracy first reached the target, between evaluations by a straight line; None = never."""
    for (t0, a0), (t1, a1) in pairwise(curve):
        if a1 >= target:
            return t0 + (t1 - t0) * max(0.0, (target - a0) / (a1 - a0))
    return None


def measure(kind: str, seed: int, steps: int, evaluate_every: int) -> dict[str, Any]:
    """One run in a process of its own."""
    side, threads = KINDS[kind]
    command = [sys.executable, __file__, "--side", side, "--seed", str(seed), "--steps", str(steps)]
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command += ["--evaluate-every", str(evaluate_every)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {"kind": kind, "seed": seed, "steps": steps, "commit": commit_of_checkout(), **found}


def measure_all(kinds: Sequence[str], seeds: int, steps: int, evaluate_every: int, out: Path | None) -> None:
    """Run the kinds with every seed, one after another, and print a line for each."""
    runs: list[dict[str, Any]] = []
    print(f"{'':>22} {'seed':>4} {'responses/s':>12} {'s to 60%':>9} {'start':>6} {'final':>6} {'lag':>5}", flush=True)
    for seed in range(seeds):
        for kind in kinds:
            runs.append(measure(kind, seed, steps, evaluate_every))
            print(line_of(runs[-1]), flush=True)
            if out is not None:
                out.write_text(json.dumps(runs))
    means = {
        kind: statistics.mean(run["responses_per_second"] for run in runs if run["kind"] == kind) for kind in kinds
    }
    ours = [mean for kind, mean in means.items() if KINDS[kind][0] == "tba"]
    theirs = [mean for kind, mean in means.items() if KINDS[kind][0] == "trl"]
    if ours and theirs:
        print(f"responses trained per wall second, tba / TRL's better: {ours[0] / max(theirs):.2f}")


def line_of(run: dict[str, Any]) -> str:
    seconds, curve = seconds_to(run["curve"]), run["curve"]
    reached = "never" if seconds is None else f"{seconds:.0f}"
    return (
        f"{run['kind']:>22} {run['seed']:>4} {run['responses_per_second']:>12.0f} {reached:>9} {curve[0][1]:>6.1%} "
        f"{curve[-1][1]:>6.1%} {run['lag']:>5.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--evaluate-every", type=int, default=40, help="steps between two evaluations")
    parser.add_argument("--out", type=Path, help="JSON file for the runs and their curves")
    parser.add_argument("--side", choices=["tba", "trl"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.side:
        run = run_tba if arguments.side == "tba" else run_trl
        print(json.dumps(run(arguments.seed, arguments.steps, arguments.evaluate_every)))
    else:
        measure_all(arguments.kinds, arguments.seeds, arguments.steps, arguments.evaluate_every, arguments.out)


if __name__ == "__main__":
    main()
