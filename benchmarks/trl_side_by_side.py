"""GSM8K end to end on one GPU: trained responses per second of tba and of TRL's GRPO with vLLM colocated.

    python benchmarks/trl_side_by_side.py --model MODEL --data FOLDER                   both, about 6 minutes on an H200
    python benchmarks/trl_side_by_side.py --model MODEL --data FOLDER --sides trl --steps 25
    python benchmarks/trl_side_by_side.py --model MODEL --data FOLDER --trl-generate transformers      without vLLM

Needs TRL 1.16 (extra `benchmark`) and a vLLM that it supports (0.22 to 0.31). Same model in bf16, same prompts and reward
(the task of configs/gsm8k_one_gpu.yaml), same batch: 16 prompts x 16 samples a step, at most 400 new tokens, temperature 1.
Every trained response is newly generated and trained once, on both sides (tba: no deduplication). TRL
has its defaults but for what makes it faster: weights in bf16 instead of fp32, no gradient checkpointing, micro-batches of
32. The rates are those of the steps after --skip: what compiles is behind them. One after the other, each in a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_bench.processes import run_alone
from gpu_bench.workloads import Row, print_table

ROOT = Path(__file__).resolve().parents[1]
VLLM_MEMORY, VLLM_LENGTH = 0.3, 1024
"""Share of the GPU that TRL gives to vLLM (its default), and the longest sequence there."""
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1",
}  # fmt: skip
"""Defaults for a machine without network; a variable that is set already keeps its value."""
FRESH = "on_policy_probability=1 max_replay_ratio=1 deduplicate=false"
"""Settings of `replay` with which every response is new and trained once."""


def run_tba(arguments: argparse.Namespace) -> dict[str, Any]:
    """`tba train` in a process. Its metrics have the time of every step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tba", "train", str(ROOT / "configs" / "gsm8k_one_gpu.yaml")]
        settings = {
            "model.path": arguments.model, "task.data": arguments.data, "train.max_steps": arguments.steps,
            "train.responses_per_step": arguments.prompts * arguments.samples,
            "train.samples_per_prompt": arguments.samples, "generate.max_new_tokens": arguments.new_tokens,
            "evaluate.every": 0, "evaluate.num_prompts": 16, "train.keep_checkpoints": 0,
            "output": folder, "name": "run", "observe.progress": "false",
        }  # fmt: skip
        command += [f"{key}={value}" for key, value in settings.items()]
        command += [] if arguments.as_configured else [f"replay.{setting}" for setting in FRESH.split()]
        command += arguments.set
        # --set replaces the settings above: a key has one value on a command line.
        command = list({part.partition("=")[0]: part for part in command}.values())
        try:
            status = subprocess.run(command, check=False, cwd=ROOT, timeout=0.9 * arguments.seconds).returncode
        except subprocess.TimeoutExpired:
            status = -9  # what it has written counts
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    steps = [step for step in steps if "completions/mean_length" in step]
    assert len(steps) > arguments.skip + 1, f"tba train ended with status {status} after {len(steps)} steps"
    # Each line stands for one optimizer step, also where one was not logged: the numbers are in it.
    first, last = steps[arguments.skip - 1], steps[-1]
    count, seconds = last["step"] - first["step"], last["seconds"] - first["seconds"]
    timed = steps[arguments.skip :]
    length = sum(step["completions/mean_length"] for step in timed) / len(timed)
    reward = sum(step["reward"] for step in timed) / len(timed)
    return figures(arguments, count, seconds, length, reward)


def figures(arguments: argparse.Namespace, steps: int, seconds: float, length: float, reward: float) -> dict[str, Any]:
    rate = steps * arguments.prompts * arguments.samples / seconds
    return {
        "responses_per_second": rate, "tokens_per_second": rate * length, "steps": steps, "step_seconds": seconds / steps,
        "mean_length": length, "reward": reward,
    }  # fmt: skip


def run_trl(arguments: argparse.Namespace) -> dict[str, Any]:
    """GRPOTrainer as its user would run it, with a callback that notes when each step ends."""
    if arguments.trl_generate == "vllm":
        os.environ.update(VLLM_ENVIRONMENT | os.environ)
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from tba.config import load_config
    from tba.tasks.registry import make_task
    from tba.types import Completion

    settings = load_config(
        ROOT / "configs" / "gsm8k_one_gpu.yaml", [f"model.path={arguments.model}", f"task.data={arguments.data}"]
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    task = make_task(settings.task, tokenizer, max_prompt_tokens=VLLM_LENGTH - arguments.new_tokens)
    prompts = {str(prompt.columns["question"]): prompt for prompt in task.prompts("train")}
    rows = [{"prompt": task._ask(question), "question": question} for question in prompts]
    lengths: list[float] = []
    rewards: list[float] = []

    def exact_match(
        completions: list[Any], completion_ids: list[list[int]], question: list[str], **_: object
    ) -> list[float]:
        found = []
        for text, ids, asked in zip(completions, completion_ids, question):
            content = text if isinstance(text, str) else text[0]["content"]
            finish = "stop" if ids and ids[-1] == tokenizer.eos_token_id else "length"
            nothing: Any = []
            one = Completion(
                prompt_id="", sample_index=0, token_ids=nothing, behaviour_log_probs=nothing, policy_log_probs=nothing,
                version_spans=(), finish=finish,
            )  # fmt: skip
            (outcome,) = task.score(prompts[asked], [content], [one])
            found.append(outcome["exact_match"])
        lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        rewards.append(sum(found) / len(found))
        return found

    ends: list[float] = []

    def measured() -> dict[str, Any]:
        count = len(ends) - arguments.skip
        length, reward = sum(lengths) / len(lengths), sum(rewards) / len(rewards)
        return figures(arguments, count, ends[-1] - ends[arguments.skip - 1], length, reward)

    class Steps(TrainerCallback):
        def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:
            ends.append(time.perf_counter())
            print(f"  trl step {state.global_step} at {ends[-1] - begun:.1f} s, reward {rewards[-1]:.3f}", flush=True)
            if len(ends) == arguments.skip:
                del lengths[:], rewards[:]
            elif len(ends) > arguments.skip + 1:  # at once: one that is stopped has written what it measured
                arguments.json.write_text(json.dumps(measured()))

    vllm: dict[str, Any] = {"use_vllm": False}
    if arguments.trl_generate == "vllm":
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": VLLM_MEMORY}
        vllm["vllm_max_model_length"] = VLLM_LENGTH
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, seed=0, max_steps=arguments.steps, temperature=1.0, num_generations=arguments.samples,
            per_device_train_batch_size=arguments.micro_batch, max_completion_length=arguments.new_tokens,
            gradient_accumulation_steps=arguments.prompts * arguments.samples // arguments.micro_batch,
            gradient_checkpointing=False, bf16=not arguments.cpu, use_cpu=arguments.cpu,
            model_init_kwargs={"dtype": "float32" if arguments.cpu else "bfloat16"},
            report_to="none", save_strategy="no", logging_steps=1000, disable_tqdm=True, **vllm,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=str(arguments.model), reward_funcs=exact_match, args=config, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer, callbacks=[Steps()],
        )  # fmt: skip
        begun = time.perf_counter()
        trainer.train()
    return measured()


def run(side: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """One side in a process of its own; None, with a line, where it failed."""
    found = Path(tempfile.mkdtemp()) / "found.json"
    command = [sys.executable, __file__, *sys.argv[1:], "--sides", side, "--only", "--json", str(found)]
    started = time.monotonic()
    status = run_alone(command, seconds=arguments.seconds)
    said = "" if status == 0 else f", exit status {status}"
    if status is None:
        said = f", stopped after {arguments.seconds:.0f} s (--seconds)"
    print(f"{side}: {time.monotonic() - started:.0f} s{said}", flush=True)
    return json.loads(found.read_text()) if found.exists() else None


def rows_of(results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for side, got in results.items():
        rows.append(
            Row(
                work=f"GSM8K, {arguments.prompts} x {arguments.samples} a step, {side}",
                figure=f"{got['responses_per_second']:.1f} trained responses/s, {got['tokens_per_second']:,.0f} tok/s, "
                f"{got['step_seconds']:.2f} s a step over {got['steps']} (mean length {got['mean_length']:.0f}, reward "
                f"{got['reward']:.3f})",
            )
        )
    if {"tba", "trl"} <= set(results):
        ratio = results["tba"]["responses_per_second"] / results["trl"]["responses_per_second"]
        rows.append(Row(work="tba over TRL", figure=f"{ratio:.2f}x"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a chat model")
    parser.add_argument("--data", type=Path, required=True, help="a folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--sides", nargs="+", choices=["trl", "tba"], default=["trl", "tba"])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--skip", type=int, default=5, help="first steps that are not timed")
    parser.add_argument("--trl-generate", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--samples", type=int, default=16, help="of a prompt")
    parser.add_argument("--new-tokens", type=int, default=400, help="most tokens of a response")
    parser.add_argument("--micro-batch", type=int, default=32, help="responses in one of TRL's backward passes")
    parser.add_argument(
        "--as-configured", action="store_true", help="tba may train on responses again, as it does unasked"
    )
    parser.add_argument("--set", nargs="*", default=[], help="more settings of tba, key=value")
    parser.add_argument("--seconds", type=float, default=420.0, help="most seconds for one side")
    parser.add_argument("--cpu", action="store_true", help="TRL in fp32 on the CPU, to try this script")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if arguments.only:
        (side,) = arguments.sides
        arguments.json.write_text(json.dumps({"trl": run_trl, "tba": run_tba}[side](arguments)))
        return
    results = {}
    for side in arguments.sides:
        got = run(side, arguments)
        if got is not None:
            results[side] = got
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))
    print_table(rows_of(results, arguments), "GSM8K end to end")


if __name__ == "__main__":
    main()
