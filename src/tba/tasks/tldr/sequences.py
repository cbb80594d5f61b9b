"""Prompt, response and EOS as one token sequence for a scorer, and padded batches of those.

Prompt and response are tokenised apart and their ids joined, so that token boundaries are those of a policy that read the
prompt and wrote the response. Axes: N sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tba.tasks.encoding import encode


class Sequenced(NamedTuple):
    """Sequenced(token_ids=[1, 40, 7, 9, 2], num_prompt_tokens=3)"""

    token_ids: list[int]
    num_prompt_tokens: int


class Padded(NamedTuple):
    """Sequences padded on the right, where no token of a causal model can see the padding."""

    token_ids_NT: Tensor
    """int64."""
    real_NT: Tensor
    """int64: 1 for tokens, 0 for padding."""
    response_NT: Tensor
    """bool: tokens of the response, its EOS included."""
    last_N: Tensor
    """int64: place of the last token that is no padding."""


def make_sequence(tokenizer: PreTrainedTokenizerBase, prompt: str, response: str, *, finished: bool) -> Sequenced:
    """The prompt has its BOS where the tokenizer puts one; the response ends with EOS if it finished and there is one."""
    prompt_ids = encode(prompt, tokenizer)
    response_ids = tokenizer(response, add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id] if finished and tokenizer.eos_token_id is not None else []
    return Sequenced([*prompt_ids, *response_ids, *end], len(prompt_ids))


def pad_right(sequences: Sequence[Sequenced], *, device: torch.device) -> Padded:
    """Padding is token 0: masked where a model looks at masks, and behind all tokens where it is causal."""
    lengths_N = torch.tensor([len(sequence.token_ids) for sequence in sequences])
    starts_N = torch.tensor([sequence.num_prompt_tokens for sequence in sequences])
    places_T = torch.arange(int(lengths_N.max()))
    token_ids_NT = torch.zeros(len(sequences), len(places_T), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        token_ids_NT[row, : len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
    real_NT = places_T < lengths_N[:, None]
    return Padded(
        token_ids_NT=token_ids_NT.to(device),
        real_NT=real_NT.long().to(device),
        response_NT=(real_NT & (places_T >= starts_N[:, None])).to(device),
        last_N=(lengths_N - 1).to(device),
    )
