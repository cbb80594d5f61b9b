"""vLLM as a searcher's engine beside the native one, on a real model: log-prob gaps, tokens per second, new weights.

    python benchmarks/vllm_engine.py configs/gsm8k_one_gpu.yaml model.path=MODEL task.data=FOLDER      on a GPU, two minutes
    python benchmarks/vllm_engine.py configs/tldr_cpu.yaml --responses 64                              on a CPU

Each engine is made as a searcher makes it and fed with the train prompts, train.samples_per_prompt samples each, without
end. Tokens per second are those of --responses responses, counted when as many have finished as there are slots. Up to
256 of them are then scored by both engines, by the trainer, and by the trainer's model in fp32. `off_policy/mismatch_kl`
of a run is the KL of the first line of each engine. New weights are given to the engine while it generates; afterwards its
scores must be the trainer's under those weights: nothing that was compiled may keep the old ones.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from tba.config import Config, load_config
from tba.generate.engine import Engine, make_engine
from tba.generate.sampling import training_sampling
from tba.launch.defaults import with_defaults
from tba.models.cpu import use_cpu
from tba.models.load import LoadedModel, load_model
from tba.models.policy import PolicyModel
from tba.models.weights import kl_estimate
from tba.runtime.threads import threads_alone
from tba.tasks.registry import make_task_for
from tba.types import Completion, Prompt, Request, Weights

SCORED = 256
"""Most responses of an engine that are scored."""
NOISE = 0.01
"""Size of the change of the weights that are handed over, relative to each weight."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an engine generated, and how fast."""

    engine: Engine
    prompts: dict[str, np.ndarray]
    completions: list[Completion]
    figures: dict[str, float]

    @property
    def texts(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return [self.prompts[c.prompt_id] for c in self.completions], [c.token_ids for c in self.completions]


def endless(prompts: Sequence[Prompt], samples: int) -> Iterator[Request]:
    for visit in itertools.count():
        for prompt in prompts:
            yield Request(prompt=prompt, first_sample=visit * samples)


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory(device: torch.device) -> int | None:
    """Bytes of a GPU that nobody has, with what this process keeps for later given back; None = no GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def changed(model: PreTrainedModel, version: int) -> Weights:
    """The model's weights with noise, on its device, as a trainer publishes them: tied tensors once."""
    generator = torch.Generator(model.device).manual_seed(version)

    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, device=tensor.device, generator=generator)
        return (tensor.detach() * (1.0 + NOISE * noise)).to(tensor.dtype)

    return Weights(version=version, tensors={name: noisy(p) for name, p in model.named_parameters()})


def generate(config: Config, loaded: LoadedModel, prompts: Sequence[Prompt], kind: str, responses: int) -> Found:
    """Make the engine, generate, time it, and hand over new weights in between."""
    settings, samples = config.generate.model_copy(update={"engine": kind}), config.train.samples_per_prompt
    free = free_memory(loaded.model.device)
    started = time.perf_counter()
    engine = make_engine(loaded.model, loaded.tokenizer, settings, seed=config.seed, max_length=loaded.context)
    figures = {"seconds to make": time.perf_counter() - started}
    stream = engine.generate(endless(prompts, samples), samples_per_prompt=samples, sampling=training_sampling(config))
    slots = settings.slots
    assert slots is not None  # with_defaults has set it
    for _ in range(slots):  # then what is compiled is compiled, and slots hold responses of all ages
        next(stream)
    wait_for_device()
    started = time.perf_counter()
    completions = [next(stream) for _ in range(responses)]
    seconds = time.perf_counter() - started
    tokens = sum(len(completion.token_ids) for completion in completions)
    figures |= {"tokens/s": tokens / seconds, "responses/s": responses / seconds, "mean length": tokens / responses}
    figures["slots"] = float(slots)
    new, loads = [changed(loaded.model, version) for version in (1, 2)], []
    for index in range(10):  # in flight: every slot is at work
        weights = Weights(version=index + 1, tensors=new[index % 2].tensors)
        wait_for_device()
        started = time.perf_counter()
        engine.load(weights)
        wait_for_device()
        loads.append(1e3 * (time.perf_counter() - started))
        next(stream)
    stream.close()
    figures |= {"update ms, median": float(np.median(loads[2:])), "update ms, longest": max(loads[2:])}
    figures["update ms, first"] = loads[0]
    engine.load(Weights(version=99, tensors=dict(loaded.model.named_parameters())))
    if free is not None:
        figures["GiB of the GPU"] = (free - torch.cuda.mem_get_info()[0]) / 2**30
    return Found(
        engine=engine,
        prompts={prompt.id: prompt.token_ids for prompt in prompts},
        completions=completions[:SCORED],
        figures=figures,
    )


def gap(mine: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> dict[str, float]:
    """Of two lists of log-probs of the same tokens."""
    a, b = (np.concatenate(list(parts)).astype(np.float64) for parts in (mine, others))
    difference = np.abs(a - b)
    return {
        "mean": float(difference.mean()),
        "p99": float(np.quantile(difference, 0.99)),
        "max": float(difference.max()),
        "kl": kl_estimate(a, b),
        "tokens": float(len(a)),
    }


def trainer_scores(
    policy: PolicyModel, tensors: dict[str, Any], texts: tuple[list[np.ndarray], list[np.ndarray]], temperature: float
) -> list[np.ndarray]:
    return [policy.log_probs_under(tensors, *pair, temperature=temperature) for pair in zip(*texts)]


def compare(config: Config, loaded: LoadedModel, found: dict[str, Found]) -> dict[str, dict[str, float]]:
    """Gaps by name, each on the responses of one engine."""
    policy, exact = PolicyModel(copy.deepcopy(loaded.model)), PolicyModel(copy.deepcopy(loaded.model).float())
    own, own_exact = (dict(p.model.named_parameters()) for p in (policy, exact))
    temperature, gaps = config.generate.temperature, {}
    for kind, work in found.items():
        texts = work.texts
        trainer = trainer_scores(policy, own, texts, temperature)
        truth = trainer_scores(exact, own_exact, texts, temperature)
        sampled = [completion.policy_log_probs for completion in work.completions]
        gaps[f"{kind} as it generates, trainer"] = gap(sampled, trainer)
        gaps[f"{kind} as it generates, fp32"] = gap(sampled, truth)
        gaps[f"trainer, fp32 ({kind}'s responses)"] = gap(trainer, truth)
        if temperature != 1.0:
            trainer = trainer_scores(policy, own, texts, 1.0)
        for other, engine in ((name, work.engine) for name, work in found.items()):
            gaps[f"{other} as it scores, trainer ({kind}'s responses)"] = gap(engine.score(*texts, 1.0), trainer)
    new = changed(loaded.model, 1)
    for kind, work in found.items():
        texts = tuple(part[:32] for part in work.texts)
        before = trainer_scores(policy, own, texts, 1.0)
        after = trainer_scores(policy, dict(new.tensors), texts, 1.0)
        work.engine.load(Weights(version=100, tensors=new.tensors))
        gaps[f"{kind} after new weights, trainer with them"] = gap(work.engine.score(*texts, 1.0), after)
        gaps[f"trainer with new weights, with the old ({kind}'s responses)"] = gap(after, before)
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"])
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    arguments = parser.parse_intermixed_args()
    transformers.logging.set_verbosity_error()
    config = load_config(Path(arguments.config), arguments.overrides)
    use_cpu(threads_alone(config))
    loaded = load_model(config.model)
    config = with_defaults(config, loaded)
    prompts = make_task_for(config, loaded).prompts("train")
    found = {kind: generate(config, loaded, prompts, kind, arguments.responses) for kind in arguments.engines}
    for kind, work in found.items():
        print(kind, "  ".join(f"{name} {value:,.4g}" for name, value in work.figures.items()), flush=True)
    with torch.no_grad():
        gaps = compare(config, loaded, found)
    print(f"\n{'log-probs of the same tokens':72} {'mean':>9} {'p99':>9} {'max':>9} {'KL':>9} {'tokens':>8}")
    for name, values in gaps.items():
        numbers = " ".join(f"{values[key]:9.2g}" for key in ("mean", "p99", "max", "kl"))
        print(f"{name:72} {numbers} {values['tokens']:8.0f}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"engines": {k: w.figures for k, w in found.items()}, "gaps": gaps}))


if __name__ == "__main__":
    main()
