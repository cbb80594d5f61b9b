"""Make the embedded red-teaming corpus and the attacker's start model:

    tba prepare red_team --output prepared

writes prepared/attacks.jsonl (`prompt`, `attack`, `mode`) and prepared/model, the model that ships in `start_model/`. It
learns the grammar of `tba.tasks.red_team.world` and nothing about the victim, so it hits as many modes as the grammar does.

Weights are saved in bfloat16, half the size; all figures are of the rounded weights.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tba.generate.native.engine import NativeEngine
from tba.tasks.encoding import make_prompt
from tba.tasks.red_team.world import draw_attack, make_tokenizer, mode_of
from tba.tasks.supervised import Shape, Training, one_deterministic_thread, train_start_model
from tba.types import Request, Sampling

SHAPE = Shape(hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, num_key_value_heads=4, context=128)
TRAINING = Training(steps=500, batch_size=128, learning_rate=3e-3)
NUM_ATTACKS = 20_000
CORPUS_SEED = 0
"""These make the shipped model."""
MAX_ATTACK_TOKENS = 16
"""Longest sampled attack, EOS included; the grammar's longest has 13 tokens."""


def prepare_red_team(
    output: Path, *, training: Training = TRAINING, num_attacks: int = NUM_ATTACKS, num_samples: int = 1024
) -> dict[str, Any]:
    """Write corpus and start model; returns what was made: {"model": ..., "parameters": ..., "success": ..., ...}."""
    started = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    attacks = draw_corpus(num_attacks)
    write_attacks(output / "attacks.jsonl", attacks)
    tokenizer = make_tokenizer()
    with one_deterministic_thread():
        model: Any = train_start_model(lambda rng: attack_pairs(attacks, rng), tokenizer, SHAPE, training)
        model = model.to(torch.bfloat16)
        model.save_pretrained(output / "model")
        tokenizer.save_pretrained(output / "model")
        hits = [mode_of(*sample) for sample in sample_attacks(model.float(), tokenizer, num_samples, seed=0)]
    found = [mode for mode in hits if mode is not None]
    return {
        "model": str(output / "model"),
        "parameters": model.num_parameters(),
        "success": len(found) / num_samples,
        "modes": len(set(found)),
        "attacks": num_attacks,
        "seconds": round(time.monotonic() - started, 1),
    }


def draw_corpus(num_attacks: int) -> list[str]:
    rng = random.Random(CORPUS_SEED)
    return [draw_attack(rng) for _ in range(num_attacks)]


def write_attacks(path: Path, attacks: Sequence[str]) -> None:
    """One row per attack, with the mode that it hits or null."""
    with path.open("w", encoding="utf-8") as file:
        for attack in attacks:
            row = {"prompt": "", "attack": attack, "mode": mode_of(attack, True)}
            file.write(json.dumps(row) + "\n")


def attack_pairs(attacks: Sequence[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """The corpus as answers to the empty prompt, without end, each time in another order."""
    while True:
        for attack in rng.sample(attacks, len(attacks)):
            yield "", attack


def sample_attacks(
    model: Any, tokenizer: PreTrainedTokenizerBase, num_samples: int, *, seed: int
) -> list[tuple[str, bool]]:
    """Attacks at temperature 1 after the empty prompt, and whether each ended by itself."""
    engine = NativeEngine(
        model, stop_ids=[tokenizer.eos_token_id], seed=seed, slots=256, max_length=SHAPE.context, dtype=model.dtype
    )
    prompt = make_prompt(id="attack", text="", columns={}, tokenizer=tokenizer, max_tokens=1)
    completions = engine.generate(
        [Request(prompt=prompt)],
        samples_per_prompt=num_samples,
        sampling=Sampling(max_new_tokens=MAX_ATTACK_TOKENS),
    )
    return [(tokenizer.decode(c.token_ids.tolist(), skip_special_tokens=True), c.finish == "stop") for c in completions]
