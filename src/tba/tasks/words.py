"""The tokenizer of the embedded worlds: one token per word, words separated by single spaces."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def make_word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerBase:
    """decode(encode(text)) == text for every text of these words. Puts <bos> before a text unless told not to add special
    tokens."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *words))}
    if len(vocabulary) != len(SPECIAL) + len(words):
        raise ValueError("a word occurs twice in the vocabulary.")
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return as_transformers(tokenizer)


def as_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    """A tokenizer whose vocabulary starts with SPECIAL, for transformers; it puts <bos> before a text."""
    bos = ("<bos>", SPECIAL.index("<bos>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
