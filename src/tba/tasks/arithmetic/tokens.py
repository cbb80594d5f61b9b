"""The tokenizer of the arithmetic start model: words with their leading space, single digits, signs, line breaks.

decode(encode(text)) == text for every text made of its words: each token is the very characters it stands for.
"""

from __future__ import annotations

import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from tba.tasks.arithmetic.problems import PEOPLE, SENTENCES, THINGS
from tba.tasks.maths.answers import MARKER
from tba.tasks.words import SPECIAL, as_transformers

PATTERN = rf" ?[A-Za-z]+| ?[0-9]|{MARKER}|\s| ?[^A-Za-z0-9\s]"
"""What one token is. A number is its digits; the first one carries the space before it."""
DIGITS = "0123456789"


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Puts <bos> before a text unless told not to add special tokens."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *_tokens()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return as_transformers(tokenizer)


def _tokens() -> list[str]:
    """Everything the generator can write, in a fixed order."""
    signs = [*DIGITS, *(f" {digit}" for digit in DIGITS), *"+-*/=.?", "\n", " ", MARKER]
    words: set[str] = set()
    for template in SENTENCES.values():
        for name in PEOPLE:
            for things in THINGS:
                filled = template.format(
                    Name=name, Other=name, things=things, She=PEOPLE[name].capitalize(), she=PEOPLE[name], a=1, b=1
                )
                # A sentence opens the text or follows a space.
                words |= {*re.findall(PATTERN, filled), *re.findall(PATTERN, f" {filled}")}
    return signs + sorted(words - set(signs))
