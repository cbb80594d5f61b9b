"""The check of an engine when it is made: what it generates must have the log-probs of the model that it was made from.

`check_decoder` compares one pass over whole sequences. Here the engine itself works: it prefills, forks into slots and
decodes, in its own dtype and layout of the cache, with the kernels that will choose the tokens, CUDA graphs included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tba.generate.decoder.decoder import Decoder, UnsupportedModel, tolerance
from tba.types import Completion, Prompt, Request, Sampling

PROMPT_LENGTHS = (7, 4)
"""Two lengths, so that rows are padded and positions differ between slots."""
NUM_TOKENS = 5
"""Number of tokens generated for each sample."""
SAMPLES = 3
"""Number of samples of each prompt: in bf16 single tokens may be far off, the mean of all is not."""


class Checked(Protocol):
    """What the check needs of an engine."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def max_length(self) -> int: ...

    def generate(
        self, requests: list[Request], *, samples_per_prompt: int, sampling: Sampling
    ) -> Iterator[Completion]: ...


def check_engine(model: nn.Module, engine: Checked) -> None:
    """Raise UnsupportedModel unless the engine's log-probs are those of the model's own forward pass."""
    num_tokens = min(NUM_TOKENS, engine.max_length - 1)
    if num_tokens < 1:
        return
    requests = _requests(engine.decoder.spec.vocab_size, num_tokens, engine.max_length)
    sampling = Sampling(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    completions = list(engine.generate(requests, samples_per_prompt=SAMPLES, sampling=sampling))
    prompts = {request.prompt.id: request.prompt.token_ids for request in requests}
    sequences = [np.concatenate((prompts[done.prompt_id], done.token_ids)) for done in completions]
    log_probs = _log_probs(model, sequences)
    expected = torch.cat([row[len(prompts[done.prompt_id]) - 1 :] for row, done in zip(log_probs, completions)])
    found = torch.from_numpy(np.concatenate([done.policy_log_probs for done in completions]))
    # |p - q| / max(p, q) of tokens that p sampled: at most twice the total variation distance on average, which bounds it by
    # the tolerance of `check_decoder`, and the same for a vocabulary of ten tokens and of a hundred thousand.
    difference = float(-torch.expm1(-(found - expected).abs()).mean())
    allowed = 2 * tolerance(model, engine.decoder)
    if not difference <= allowed:
        raise UnsupportedModel(
            f"probabilities of tokens that the native engine generates differ by {difference:.2g} (allowed {allowed:g}) "
            f"from those of this {engine.decoder.spec.family} model's forward pass: its prefill or decode step computes "
            "otherwise"
        )


def _requests(vocabulary: int, num_tokens: int, max_length: int) -> list[Request]:
    """A prompt of random tokens to be sampled and a shorter one to be continued greedily."""
    rng = np.random.default_rng(0)
    found = []
    for index, length in enumerate(PROMPT_LENGTHS):
        token_ids = rng.integers(vocabulary, size=min(length, max_length - num_tokens)).astype(np.int32)
        sampling = Sampling(max_new_tokens=num_tokens, min_new_tokens=num_tokens, greedy=index == 1)
        found.append(Request(prompt=Prompt(id=f"check {index}", token_ids=token_ids, text=""), sampling=sampling))
    return found


@torch.no_grad()
def _log_probs(model: nn.Module, sequences: list[np.ndarray]) -> list[Tensor]:
    """Log-prob of every token but the first of each sequence, from one pass over right-padded rows."""
    rows = [torch.from_numpy(sequence.astype(np.int64)) for sequence in sequences]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    was_training, _ = model.training, model.eval()
    logits = model(input_ids=ids.to(next(model.parameters()).device), use_cache=False).logits
    model.train(was_training)
    log_probs = logits[:, :-1].float().log_softmax(-1).cpu().gather(2, ids[:, 1:, None])[..., 0]
    return [row[: len(sequence) - 1] for row, sequence in zip(log_probs, rows)]
