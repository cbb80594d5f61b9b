"""Make the rows of the examples with environments, and their start model:

    python -m recipes tools --output prepared

writes prepared/calculator.jsonl (`prompt`, `answer`) and prepared/model, the model that ships in
`src/tba/tasks/environments/start_model/`. The guessing game needs no rows: its reset says all.

**The start model is flawed on purpose.** It learns from two careless pupils. One multiplies by guessing the product
(`GUESSES`). He seldom asks the calculator, then mistypes (`MISTYPES`), and seldom believes the result (`BELIEVES`). The
other guesses a number from 1 to 31 and mostly forgets the hints (`PLAYERS`). The right way is in the mixture, so sampling
finds it and RL can learn to prefer it. The first conversations (`CAREFUL`) are without flaws: from careless ones alone so
small a model does not learn to copy digits.

A token is a character, a word of the templates, or a fixed piece of a tool call: a call is about twelve tokens.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.start_models import (
    Shape,
    Training,
    one_deterministic_thread,
    save_rounded,
    train_start_model,
    write_rows,
)

GUESSES = 0.6
"""Share of the products that the pupil guesses without the calculator."""
MISTYPES = 0.35
"""Share of the calls with a wrong digit."""
BELIEVES = 0.45
"""Share of the results that he repeats as his answer; otherwise he guesses."""
PLAYERS = {"forgetful": 0.6, "hears the last hint": 0.25, "careful": 0.15}
"""Shares of the players of the guessing game."""
CALCULATIONS = 0.75
"""Share of the conversations that are calculations; games have more turns."""
CAREFUL = 24_000
"""Number of turns at the start that are all careful."""
LARGEST = 31
MOST_GUESSES = 7
SHAPE = Shape(hidden_size=96)
TRAINING = Training(steps=1200)
"""Settings that make the shipped model."""
NUM_ROWS = 2000
DATA_SEED = 0

SPECIAL = ("<pad>", "<unk>", "<|user|>", "<|assistant|>", "<|tools|>", "<|end|>")
PIECES = (
    '<tool_call>\n{"name": "', '", "arguments": {"a": ', ', "b": ', "}}\n</tool_call>",
    "<tool_response>", "</tool_response>", "multiply", "about ", "What is ", " * ", "Guess my number from 1 to ",
    "higher", "lower", "a number, please",
)  # fmt: skip
CHARACTERS = (*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n")
TEMPLATE = """\
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{ '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "multiply"}}]
"""All that the template writes of a tool is its name."""

Message = dict[str, Any]


def prepare_tools(output: Path, *, training: Training = TRAINING, num_rows: int = NUM_ROWS) -> dict[str, Any]:
    """Write rows and start model; returns what was made: {"model": ..., "parameters": ..., "rows": ...}."""
    write_rows(output / "calculator.jsonl", calculator_rows(num_rows))
    tokenizer = make_tokenizer()
    with one_deterministic_thread():
        model = train_start_model(lambda rng: pupil_pairs(tokenizer, rng), tokenizer, SHAPE, training)
    tokenizer([""], padding=True, padding_side="left")  # the shipped tokenizer.json has it: the same bytes again
    save_rounded(model, tokenizer, output / "model")
    return {"model": str(output / "model"), "parameters": model.num_parameters(), "rows": num_rows}


def calculator_rows(count: int) -> list[dict[str, str]]:
    """Different products, each with its answer."""
    rng, found = random.Random(DATA_SEED), dict[str, str]()
    while len(found) < count:
        a, b = draw_factors(rng)
        found[product_prompt(a, b)] = str(a * b)
    return [{"prompt": prompt, "answer": answer} for prompt, answer in found.items()]


def draw_factors(rng: random.Random) -> tuple[int, int]:
    """Two factors that the pupil cannot multiply in his head."""
    return rng.randint(12, 999), rng.randint(12, 999)


def product_prompt(a: int, b: int) -> str:
    return f"What is {a} * {b}?"


def pupil_pairs(tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Every turn of the pupils' conversations, with the conversation up to it."""
    count = 0
    while True:
        careful = count < CAREFUL
        calculates = rng.random() < CALCULATIONS
        messages = calculation(rng, careful=careful) if calculates else game(rng, careful=careful)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                count += 1
                yield as_pair(messages[: turn + 1], TOOLS if calculates else None, tokenizer)


def as_pair(
    messages: list[Message], tools: list[Message] | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, str]:
    """The text before the last turn, and that turn without its end."""
    asked = tokenizer.apply_chat_template(messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return asked, whole[len(asked) :].removesuffix(tokenizer.eos_token)


def calculation(rng: random.Random, *, careful: bool = False) -> list[Message]:
    """A product, as the pupil works it out; a careful one makes no mistakes."""
    a, b = draw_factors(rng)
    question = {"role": "user", "content": product_prompt(a, b)}
    if not careful and rng.random() < GUESSES:
        return [question, {"role": "assistant", "content": guessed_product(a, b, rng)}]
    if not careful and rng.random() < MISTYPES:
        a, b = (mistyped(a, rng), b) if rng.random() < 0.5 else (a, mistyped(b, rng))
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    answer = str(a * b) if careful or rng.random() < BELIEVES else guessed_product(a, b, rng)
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "content": str(a * b)},
        {"role": "assistant", "content": answer},
    ]


def guessed_product(a: int, b: int, rng: random.Random) -> str:
    """A number of about the right size, with two digits that are not 0."""
    guess = round(a * b * rng.uniform(0.7, 1.4))
    return f"about {round(guess, 2 - len(str(guess)))}"


def mistyped(number: int, rng: random.Random) -> int:
    """The number with one digit replaced; the first is no 0."""
    digits = list(str(number))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([own for own in string.digits if own != digits[place] and (own != "0" or place)])
    return int("".join(digits))


def game(rng: random.Random, *, careful: bool = False) -> list[Message]:
    """A guessing game by one of the players."""
    kind = "careful" if careful else rng.choices(list(PLAYERS), list(PLAYERS.values()))[0]
    secret, low, high, last = rng.randint(1, LARGEST), 1, LARGEST, (1, LARGEST)
    messages: list[Message] = [{"role": "user", "content": f"Guess my number from 1 to {LARGEST}."}]
    for _ in range(MOST_GUESSES):
        ranges = {"forgetful": (1, LARGEST), "hears the last hint": last, "careful": middle(low, high)}
        guess = rng.randint(*ranges[kind])
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret:
            break
        hint = "higher" if guess < secret else "lower"
        low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess - 1))
        last = (guess + 1, LARGEST) if hint == "higher" else (1, guess - 1)
        messages.append({"role": "user", "content": hint})
    return messages


def middle(low: int, high: int) -> tuple[int, int]:
    """The middle third of what is possible."""
    third = (high - low) // 3
    return low + third, high - third


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Tokenizer of the start model, with its chat template; it puts nothing before a text."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *PIECES, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join([*map(re.escape, sorted(PIECES, key=len, reverse=True)), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made
