"""The corpus and the start model of the embedded red-teaming edition.

    python -m recipes red_team --output prepared

writes prepared/attacks.jsonl (`prompt`, `attack`, `mode`) and prepared/model, the model that ships in
`src/tba/tasks/red_team/start_model/`. It learns the grammar of the attacks and nothing about the victim, so it hits as many
modes as the grammar does. Weights are saved in bfloat16, half the size; all figures are of the rounded weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from recipes.start_models import (
    Shape,
    Training,
    make_word_tokenizer,
    one_deterministic_thread,
    sample_texts,
    save_rounded,
    train_start_model,
    write_rows,
)
from tba.tasks.red_team.models import (
    ADJECTIVES,
    DETERMINERS,
    FLAT,
    FRAMINGS,
    OBJECTS,
    PLACES,
    STEEP,
    SUFFIXES,
    VERBS,
    WORDS,
    mode_of,
    zipf,
)
from tba.types import Sampling

ADJECTIVE_BEFORE_VERB = 0.3
NUM_ADJECTIVES = (0.5, 0.35, 0.15)
"""Probabilities of 0, 1 and 2 adjectives before the object."""
NUM_PLACES = (0.4, 0.45, 0.15)
"""Probabilities of 0, 1 and 2 places."""
SUFFIX = 0.5

SHAPE = Shape(hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, num_key_value_heads=4, context=128)
TRAINING = Training(steps=500, batch_size=128, learning_rate=3e-3)
NUM_ATTACKS = 20_000
CORPUS_SEED = 0
"""These make the shipped model."""
SAMPLING = Sampling(max_new_tokens=16)
"""Sampled attacks, EOS included; the grammar's longest has 13 tokens."""
SLOTS = 256


def prepare_red_team(
    output: Path, *, training: Training = TRAINING, num_attacks: int = NUM_ATTACKS, num_samples: int = 1024
) -> dict[str, Any]:
    """Write corpus and start model; returns what was made: {"model": ..., "parameters": ..., "success": ..., ...}."""
    rng = random.Random(CORPUS_SEED)
    attacks = [draw_attack(rng) for _ in range(num_attacks)]
    write_rows(
        output / "attacks.jsonl", [{"prompt": "", "attack": text, "mode": mode_of(text, True)} for text in attacks]
    )
    tokenizer = make_tokenizer()
    with one_deterministic_thread():
        model = train_start_model(lambda rng: attack_pairs(attacks, rng), tokenizer, SHAPE, training)
        model = save_rounded(model, tokenizer, output / "model")
        found = [mode for sample in sample_attacks(model, tokenizer, num_samples, seed=0) if (mode := mode_of(*sample))]
    return {
        "model": str(output / "model"),
        "parameters": model.num_parameters(),
        "success": len(found) / num_samples,
        "modes": len(set(found)),
        "attacks": num_attacks,
    }


def make_tokenizer() -> PreTrainedTokenizerBase:
    """One token per word, 104 in all."""
    return make_word_tokenizer(WORDS)


def attack_pairs(attacks: Sequence[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """The corpus as answers to the empty prompt, without end, each time in another order."""
    while True:
        for attack in rng.sample(attacks, len(attacks)):
            yield "", attack


def sample_attacks(
    model: Any, tokenizer: PreTrainedTokenizerBase, num_samples: int, *, seed: int
) -> list[tuple[str, bool]]:
    """Attacks at temperature 1 after the empty prompt, and whether each ended by itself."""
    (found,) = sample_texts(
        model, tokenizer, ["attack"], [""], samples_per_prompt=num_samples, sampling=SAMPLING, seed=seed, slots=SLOTS
    )
    return found


def draw_attack(rng: random.Random) -> str:
    """One sentence of the grammar, at most 12 words."""
    words = [_draw(rng, FRAMINGS, STEEP)]
    if rng.random() < ADJECTIVE_BEFORE_VERB:
        words.append(_draw(rng, ADJECTIVES))
    words += [_draw(rng, VERBS, STEEP), _draw(rng, DETERMINERS)]
    words += [_draw(rng, ADJECTIVES) for _ in range(_draw_number(rng, NUM_ADJECTIVES))]
    words.append(_draw(rng, OBJECTS, STEEP))
    for _ in range(_draw_number(rng, NUM_PLACES)):
        words += [_draw(rng, DETERMINERS), _draw(rng, PLACES)]
    if rng.random() < SUFFIX:
        words.append(_draw(rng, SUFFIXES))
    return " ".join(words)


def _draw(rng: random.Random, words: Sequence[str], exponent: float = FLAT) -> str:
    return rng.choices(words, zipf(len(words), exponent))[0]


def _draw_number(rng: random.Random, probabilities: Sequence[float]) -> int:
    return rng.choices(range(len(probabilities)), probabilities)[0]
