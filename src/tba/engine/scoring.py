"""Log-probs of given responses under a frozen model: what searchers need of the reference.

Teacher-forced, without gradient. Prompts and responses are packed end to end, as in training: no padding, and the
responses of one prompt share one pass over it. The native decoder computes the pass where it knows the model; otherwise the
model does, as the trainer runs it. The reference of a LoRA run is its base model: the model itself with the adapter off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.engine.decoder.build import make_decoder
from tba.engine.decoder.decoder import Decoder
from tba.engine.decoder.spec import DecoderSpec
from tba.models.load import adapter_off, has_lora, load_published
from tba.models.log_probs import chosen_log_probs
from tba.models.packed_attention import PackedLayout, attend_packed
from tba.models.packing import PackedTokens, pack, split_by_budget
from tba.models.policy import PolicyModel
from tba.types import Weights


class ReferenceScorer:
    """Scores with a copy of the model in the native decoder, or with a decoder as it is."""

    def __init__(
        self,
        model: nn.Module | Decoder,
        *,
        max_length: int = 0,
        token_budget: int = 2048,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`max_length` (prompt + response) is needed unless a decoder is given; a GPU wants a larger `token_budget`."""
        if isinstance(model, Decoder):
            self.decoder = model
        else:
            self.decoder = make_decoder(model, max_length=max_length, dtype=dtype, device=torch.device(device))
        self.token_budget = token_budget

    def load(self, weights: Weights) -> None:
        self.decoder.load(weights.tensors)

    @torch.inference_mode()
    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        decoder = self.decoder

        def log_probs(packed: PackedTokens) -> Tensor:
            attend = PackedAttention(decoder.spec, packed.layout, decoder.attention_dtype)
            # Only hidden states that predict a response token go through the head.
            hidden = decoder.hidden(packed.input_ids_T, packed.positions_T, attend)[packed.predict_M]
            head, softcap = decoder.weights.head, decoder.spec.logit_cap
            found, _ = chosen_log_probs(hidden, head, packed.targets_M, temperature=temperature, softcap=softcap)
            # Equal responses of a prompt were computed once; every one that was asked for gets its log-probs.
            return packed.expand(found)

        return _score(prompt_ids, response_ids, log_probs, token_budget=self.token_budget, device=decoder.device)


class PolicyScorer:
    """Scores with the model itself, packed where it can be, else one response after another. An adapter is off meanwhile."""

    def __init__(self, model: PreTrainedModel, *, token_budget: int, max_length: int | None = None) -> None:
        self.policy = PolicyModel(model, max_length=max_length)
        # A budget of one token puts every response into a pass of its own.
        self.token_budget = token_budget if self.policy.packed else 1

    def load(self, weights: Weights) -> None:
        if has_lora(self.policy.model):
            raise RuntimeError("the reference of a LoRA run is its base model: reference.reset_every must be 0.")
        load_published(self.policy.model, weights.tensors)

    @torch.no_grad()
    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        policy = self.policy

        def log_probs(packed: PackedTokens) -> Tensor:
            return policy.forward(packed, temperature=temperature).log_pi_N.float()

        with adapter_off(policy.model):
            return _score(prompt_ids, response_ids, log_probs, token_budget=self.token_budget, device=policy.device)


class PackedAttention:
    """Attention over packed sequences, as training lays them out: roots, and branches that continue them."""

    def __init__(self, spec: DecoderSpec, layout: PackedLayout, dtype: torch.dtype) -> None:
        self.spec, self.layout, self.dtype = spec, layout, dtype

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor) -> None:
        # Of this layer only: all tokens are in one pass, so nothing comes back to an earlier layer's.
        self.key_NKD, self.value_NKD = key_NKD.to(self.dtype), value_NKD.to(self.dtype)

    def attend(self, layer: int, query_NHD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        attended = attend_packed(
            query_NHD.to(self.dtype),
            self.key_NKD,
            self.value_NKD,
            self.layout,
            scaling=self.spec.query_scales[layer],
            window=self.spec.windows[layer],
            softcap=self.spec.attention_cap,
            sinks_H=sinks_H,
        )
        return attended.flatten(1)


def _score(
    prompt_ids: Sequence[np.ndarray],
    response_ids: Sequence[np.ndarray],
    log_probs: Callable[[PackedTokens], Tensor],
    *,
    token_budget: int,
    device: torch.device,
) -> list[np.ndarray]:
    """Log-probs by packed passes; `log_probs` gives those of all response tokens of a pass, in their order."""
    # int64 all of them: the bytes of equal prompts would differ otherwise.
    prompts, responses = ([np.array(ids, dtype=np.int64) for ids in rows] for rows in (prompt_ids, response_ids))
    scores = [np.zeros(0, dtype=np.float32)] * len(responses)
    for batch in packed_batches(prompts, responses, token_budget=token_budget):
        # A batch lists the responses of each prompt; `pack` lays the prompt down once for all of them.
        owners = [torch.from_numpy(prompts[members[0]]) for members in batch]
        own = [[torch.from_numpy(responses[index]) for index in members] for members in batch]
        found = log_probs(pack(owners, own, device=device)).cpu().numpy()
        # Log-probs come back prompt by prompt, and are put where each response was given.
        order = [index for members in batch for index in members]
        for index, part in zip(order, np.split(found, np.cumsum([len(responses[index]) for index in order])[:-1])):
            scores[index] = part
    return scores


def packed_batches(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], *, token_budget: int
) -> Iterator[list[list[int]]]:
    """Indices of responses, by prompt, at most `token_budget` tokens at once (a longer response alone); empty responses, of
    which there is nothing to score, are left out."""
    first: dict[bytes, int] = {}
    # Equal prompts have one owner, the first index at which the prompt occurs.
    owner = [first.setdefault(prompt.tobytes(), index) for index, prompt in enumerate(prompts)]
    order = sorted((index for index, response in enumerate(responses) if len(response)), key=lambda index: owner[index])

    def cost(batch: Sequence[int], index: int) -> int:
        is_shared = bool(batch) and owner[batch[-1]] == owner[index]  # the responses of a prompt follow each other
        return len(responses[index]) + (0 if is_shared else len(prompts[index]))

    for batch in split_by_budget(order, max_tokens=token_budget, cost=cost):
        members: dict[int, list[int]] = {}
        for index in batch:
            members.setdefault(owner[index], []).append(index)
        yield list(members.values())
