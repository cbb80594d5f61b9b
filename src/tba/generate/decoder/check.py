"""The checks that a decoder, and an engine over it, compute what the model they were made from computes.

`check_decoder` compares one pass over whole sequences. `check_engine` has the engine itself at work: it prefills, forks into
slots and decodes, in its own dtype and layout of the cache, with the kernels that will choose the tokens, CUDA graphs
included.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor, nn

from tba.generate.contract import Engine
from tba.generate.decoder.attention import CausalAttention
from tba.generate.decoder.decoder import Decoder
from tba.generate.decoder.spec import UnsupportedModel
from tba.types import Prompt, Request, Sampling

logger = logging.getLogger("tba.models")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest mean total variation distance to the model's own next-token distribution, by the coarser dtype of the two."""
LONGEST_WINDOW = 64
"""Longest window that the check sees the end of: longer ones would make it slow on a large model."""
PROMPT_LENGTHS = (7, 4)
"""Two lengths, so that rows are padded and positions differ between slots."""
NUM_TOKENS = 5
"""Number of tokens generated for each sample."""
SAMPLES = 3
"""Number of samples of each prompt: in bf16 single tokens may be far off, the mean of all is not."""


def check_decoder(model: nn.Module, decoder: Decoder, max_length: int) -> None:
    """Check the pass that would serve; a fused one that fails, or is wrong, is replaced by the plain one, with a warning."""
    try:
        _check_against(model, decoder, max_length)
    except Exception as error:  # a kernel may fail to compile in as many ways as there are drivers
        if decoder.fused_pass is None:
            raise
        logger.warning("fused kernels are not used: %s: %.300s", type(error).__name__, error)
        decoder.fused_pass = None
        _check_against(model, decoder, max_length)


def tolerance(model: nn.Module, decoder: Decoder) -> float:
    """Largest mean total variation distance that rounding explains."""
    is_coarse = torch.bfloat16 in (decoder.dtype, next(model.parameters()).dtype)
    return TOLERANCE[torch.bfloat16 if is_coarse else torch.float32]


@torch.no_grad()
def _check_against(model: nn.Module, decoder: Decoder, max_length: int) -> None:
    """Log-probs of a few random tokens must be those of the model's own forward pass; of more where windows are short."""
    short = [window for window in decoder.spec.windows if window is not None and window <= LONGEST_WINDOW]
    length = min(max(12, *(window + 4 for window in short), 0), max_length)
    ids = torch.randint(decoder.spec.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    expected = _own_log_probs(model, ids)
    positions = torch.arange(length).expand(2, -1).reshape(-1).to(decoder.device)
    # In the dtype that serves: a mask or a kernel that fails, or loses too much, in half precision must fail here.
    attend = CausalAttention(decoder.spec, 2, length, dtype=decoder.attention_dtype)
    hidden = decoder.hidden(ids.reshape(-1).to(decoder.device), positions, attend)
    found = decoder.logits(hidden).log_softmax(-1).cpu().view_as(expected)
    allowed = tolerance(model, decoder)
    # Not the largest gap of log-probs: in bf16 those of tokens that never come are off by whole nats in both. And not the
    # worst position: two bf16 passes of a small chat model differ by 0.16 at one of 24, by 0.04 on average.
    difference = float((found.exp() - expected.exp()).abs().sum(-1).mean()) / 2
    if not difference <= allowed:
        raise UnsupportedModel(
            f"the native decoder's next-token distribution differs from this {decoder.spec.family} model's forward pass by "
            f"{difference:.2g} (allowed {allowed:g}): its config uses something the decoder does not know"
        )


def check_engine(model: nn.Module, engine: Engine, decoder: Decoder, max_length: int) -> None:
    """Raise UnsupportedModel unless the engine's log-probs are those of the model's own forward pass."""
    num_tokens = min(NUM_TOKENS, max_length - 1)
    if num_tokens < 1:
        return
    requests = _requests(decoder.spec.vocab_size, num_tokens, max_length)
    sampling = Sampling(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    completions = list(engine.generate(requests, samples_per_prompt=SAMPLES, sampling=sampling))
    prompts = {request.prompt.id: request.prompt.token_ids for request in requests}
    rows = [torch.from_numpy(np.concatenate((prompts[done.prompt_id], done.token_ids))).long() for done in completions]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # padding comes last: no real token sees it
    log_probs = _own_log_probs(model, ids)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    parts = [slice(len(prompts[done.prompt_id]) - 1, len(row) - 1) for done, row in zip(completions, rows)]
    expected = torch.cat([found[part] for found, part in zip(log_probs, parts)])
    found = torch.from_numpy(np.concatenate([done.policy_log_probs for done in completions]))
    # |p - q| / max(p, q) of tokens that p sampled: at most twice the total variation distance on average, which bounds it by
    # the tolerance of `check_decoder`, and the same for a vocabulary of ten tokens and of a hundred thousand.
    difference = float(-torch.expm1(-(found - expected).abs()).mean())
    allowed = 2 * tolerance(model, decoder)
    if not difference <= allowed:
        raise UnsupportedModel(
            f"probabilities of tokens that the native engine generates differ by {difference:.2g} (allowed {allowed:g}) "
            f"from those of this {decoder.spec.family} model's forward pass: its prefill or decode step computes "
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
def _own_log_probs(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """Log-probs [B, T, V] by the model's own forward pass."""
    was_training, _ = model.training, model.eval()
    logits = model(input_ids=ids_BT.to(next(model.parameters()).device), use_cache=False).logits
    model.train(was_training)
    return logits.float().log_softmax(-1).cpu()
