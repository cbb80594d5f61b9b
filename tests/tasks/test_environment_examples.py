"""The examples with environments: their rules by hand, the start model's tokens, and a run that learns."""

import importlib.util
import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from recipes.tools import NUM_ROWS, calculator_rows, make_tokenizer, mistyped, pupil_pairs
from tba.config import load_config
from tba.models.paths import resolve_path
from tba.run.start import train
from tba.tasks.environments.chat_format import ChatFormat
from tba.tasks.environments.playground import Kind, Playground
from tba.tasks.environments.schemas import tool_schema

ROOT = Path(__file__).parents[2]


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "environments" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


calculator, guessing = example("calculator"), example("guessing")


def assistant(content, **others):
    return {"role": "assistant", "content": content, **others}


def test_only_a_last_message_with_the_product_is_right():
    result = {"role": "tool", "name": "multiply", "content": "29842"}
    completions = [
        [assistant("", tool_calls=[{}]), result, assistant("29842")],
        [assistant("", tool_calls=[{}]), result, assistant("29843")],
        [assistant("29842")],
        [assistant("", tool_calls=[{}]), result],
        [assistant("29842", tool_calls=[{}])],
        [],
    ]
    assert calculator.right(completions, answer=["29842"] * 6) == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert calculator.multiply(347, 86) == 29842


def test_a_game_pays_for_the_win_and_less_for_each_guess():
    made = Playground({"it": Kind.of("Guessing", guessing.Guessing)}, {}, copies=True)
    secret = random.Random(5).randint(1, 31)
    assert made.start("it", {}, 5).observation == "Guess my number from 1 to 31."
    assert made.step(str(secret - 1)).observation == "higher"
    assert made.step(str(secret + 1)).observation == "lower"
    assert made.step("seven").observation == "a number, please"
    assert made.step(f" {secret}").done
    assert made.finish().rewards == {"Guessing": pytest.approx(1.0 - 0.3)}  # three guesses before
    made.start("it", {}, 5)
    assert [made.step("0").done for _ in range(7)] == [False] * 6 + [True]
    assert made.finish().rewards == {"Guessing": 0.0}


def test_the_rows_are_those_of_the_recipe():
    lines = (ROOT / "examples" / "environments" / "calculator.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == calculator_rows(NUM_ROWS)
    for row in calculator_rows(20):
        a, b = row["prompt"].removeprefix("What is ").removesuffix("?").split(" * ")
        assert int(row["answer"]) == int(a) * int(b)


def test_a_mistyped_number_has_one_other_digit():
    rng = random.Random(0)
    for number in (12, 347, 999, 100):
        for _ in range(30):
            other = str(mistyped(number, rng))
            assert sum(a != b for a, b in zip(other, str(number), strict=True)) == 1


def test_tokens_of_the_start_model_are_what_its_chat_format_reads_and_writes():
    tokenizer = AutoTokenizer.from_pretrained(resolve_path("tba:tools"))
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()
    form = ChatFormat(tokenizer, [tool_schema(calculator.multiply)])
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 347, "b": 86}}\n</tool_call>'
    ids = tokenizer(call)["input_ids"]
    assert len(ids) == 10  # five fixed pieces and five digits
    (found,) = form.reply(np.array([*ids, tokenizer.eos_token_id])).calls
    assert (found.name, found.arguments) == ("multiply", {"a": 347, "b": 86})
    # The ids turn by turn are those of the whole conversation, which the start model has learned from.
    asked = form.prompt_ids([{"role": "user", "content": "What is 347 * 86?"}]).tolist()
    answered = form.next_turn_ids([{"role": "tool", "name": "multiply", "content": "29842"}]).tolist()
    text = tokenizer.decode([*asked, *ids, tokenizer.eos_token_id, *answered])
    assert text == (
        f"<|tools|>multiply<|end|><|user|>What is 347 * 86?<|end|><|assistant|>{call}<|end|>"
        "<tool_response>29842</tool_response><|assistant|>"
    )
    assert [*asked, *ids, tokenizer.eos_token_id, *answered] == tokenizer(text)["input_ids"]


def test_the_pupils_pairs_go_through_the_tokenizer_unchanged():
    tokenizer = make_tokenizer()
    for asked, turn in islice(pupil_pairs(tokenizer, random.Random(0)), 200):
        ids = tokenizer(asked + turn)["input_ids"]
        assert tokenizer.decode(ids) == asked + turn
        assert tokenizer.unk_token_id not in ids
        assert tokenizer(asked)["input_ids"] + tokenizer(turn)["input_ids"] == ids


@pytest.mark.slow
@pytest.mark.parametrize(("name", "before", "after"), [("calculator", 0.15, 0.5)])
def test_an_example_learns(name, before, after, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # the config's paths are those of a clone
    short = ["train.max_seconds=60", "train.max_steps=60", f"output={tmp_path}", "name=run", "observe.progress=false"]
    summary = train(load_config(ROOT / "configs" / f"{name}.yaml", short))
    assert summary["start"]["reward@4"] <= before
    assert summary["final"]["reward@4"] >= after
