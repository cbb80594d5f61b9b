"""Making the attacker's start model, and the one that ships."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.red_team import SHAPE, make_tokenizer, prepare_red_team, sample_attacks
from recipes.start_models import Training, make_model, one_deterministic_thread
from tba.models.paths import resolve_path
from tba.tasks.red_team.models import mode_of

START_MODEL = Path(resolve_path("tba:red_team"))
pytestmark = pytest.mark.slow

SHORT = Training(steps=3, batch_size=4)


@pytest.fixture(scope="module")
def shipped():
    model = AutoModelForCausalLM.from_pretrained(START_MODEL, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(START_MODEL)


def test_preparing_twice_gives_the_same_bytes(tmp_path):
    made = []
    for seed, folder in enumerate(("a", "b")):
        torch.manual_seed(seed)  # the caller's randomness must not matter
        made.append(prepare_red_team(tmp_path / folder, training=SHORT, num_attacks=40, num_samples=16))
    for file in ("model/model.safetensors", "model/tokenizer.json", "attacks.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    assert made[0]["success"] == made[1]["success"]


def test_the_corpus_names_the_mode_of_each_attack(tmp_path):
    made = prepare_red_team(tmp_path, training=SHORT, num_attacks=200, num_samples=4)
    rows = [json.loads(line) for line in (tmp_path / "attacks.jsonl").read_text().splitlines()]
    assert len(rows) == made["attacks"] == 200
    assert all(row["mode"] == mode_of(row["attack"], True) for row in rows)
    assert any(row["mode"] for row in rows)


def test_the_shipped_model_is_small_and_has_the_prepared_shape(shipped):
    model, tokenizer = shipped
    assert sum(file.stat().st_size for file in START_MODEL.iterdir()) < 1_200_000
    assert model.num_parameters() == 505_728
    fresh = make_model(make_tokenizer(), SHAPE, seed=0)
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()


def test_the_shipped_model_hits_as_often_as_the_grammar(shipped):
    with one_deterministic_thread():
        samples = sample_attacks(*shipped, 1024, seed=1)
    hits = [mode for mode in (mode_of(*sample) for sample in samples) if mode is not None]
    # 5.8% of 32,768 samples, with 20 to 28 modes in 1,024; two standard errors of 1,024 are 1.5 points.
    assert 0.04 <= len(hits) / 1024 <= 0.08
    assert 18 <= len(set(hits)) <= 30
    assert sum(finished for _, finished in samples) >= 1020
