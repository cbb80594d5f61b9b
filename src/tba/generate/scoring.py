"""Log-probs of given responses under a frozen model: what searchers need of the reference.

Teacher-forced with the native decoder; the responses of one prompt share one pass over the prompt. No gradient. On CUDA
prompts and responses are packed end to end, as in training, without padding. On a CPU padded blocks are faster: a pass over
the prompts, then passes over responses, each of which starts with its prompt's last token, so that it predicts exactly the
response's tokens. The reference of a LoRA run is its base model: the trainer's own model with the adapter off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.generate.decoder.attention import CausalAttention, SharedPrefixAttention
from tba.generate.decoder.build import make_decoder
from tba.generate.decoder.decoder import Decoder
from tba.generate.decoder.spec import DecoderSpec
from tba.models.load import adapter_off
from tba.policy.log_probs import chosen_log_probs
from tba.policy.model import PolicyModel
from tba.policy.packed_attention import PackedLayout, attend_packed
from tba.policy.packing import length_batches, pack, padded, split_by_budget
from tba.types import Weights


class ReferenceScorer:
    """Scores with a copy of the model in the native decoder, or with a decoder as it is.

    ReferenceScorer(model, max_length=512).score(prompts, responses, temperature=1.0)
    """

    def __init__(
        self,
        model: nn.Module | Decoder,
        *,
        max_length: int = 0,
        token_budget: int = 2048,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        packed: bool | None = None,
    ) -> None:
        """`max_length` (prompt + response) is needed unless a decoder is given; a GPU wants a larger `token_budget`, and
        packs unless told otherwise."""
        if isinstance(model, Decoder):
            self.decoder = model
        else:
            self.decoder = make_decoder(model, max_length=max_length, dtype=dtype, device=torch.device(device))
        self.token_budget = token_budget
        self._packed = self.decoder.device.type == "cuda" if packed is None else packed

    def load(self, weights: Weights) -> None:
        """Replace the frozen model by another of the same shape (a reference reset)."""
        self.decoder.load(weights.tensors)

    @torch.inference_mode()
    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """float32 log-probs of each response's tokens after its prompt, at `temperature`; equal prompts are shared."""
        responses_of: dict[bytes, list[int]] = {}
        for index, prompt in enumerate(prompt_ids):
            # One dtype, or the bytes of equal prompts would differ.
            responses_of.setdefault(np.asarray(prompt, dtype=np.int64).tobytes(), []).append(index)
        prompts = [np.frombuffer(key, dtype=np.int64) for key in responses_of]
        groups = list(responses_of.values())
        scores: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(response_ids)
        if self._packed:
            for members in packed_batches(prompts, groups, response_ids, token_budget=self.token_budget):
                self._score_packed(members, prompts, response_ids, temperature, scores)
            return scores
        for batch in length_batches([len(prompt) - 1 for prompt in prompts], token_budget=self.token_budget):
            owners = [(row, index) for row, prompt in enumerate(batch) for index in groups[prompt]]
            self._score_prompts([prompts[prompt] for prompt in batch], owners, response_ids, temperature, scores)
        return scores

    def _score_packed(
        self,
        batch: Mapping[int, list[int]],
        prompts: Sequence[np.ndarray],
        response_ids: Sequence[np.ndarray],
        temperature: float,
        scores: list[np.ndarray],
    ) -> None:
        """One pass over prompts with their responses; `batch` maps a prompt to the responses to score."""
        own = [
            [torch.tensor(np.asarray(response_ids[index])).long() for index in members] for members in batch.values()
        ]
        packed = pack(
            [torch.tensor(prompts[row]) for row in batch], own, share_prompts=True, device=self.decoder.device
        )
        attend = PackedAttention(self.decoder.spec, packed.layout, self.decoder.attention_dtype)
        hidden = self.decoder.hidden(packed.input_ids_T, packed.positions_T, attend)
        flat = packed.expand(self._log_probs(hidden[packed.predict_M], packed.targets_M, temperature)).cpu().numpy()
        members = [index for own_members in batch.values() for index in own_members]
        ends = np.cumsum([len(response_ids[index]) for index in members])
        for index, found in zip(members, np.split(flat, ends[:-1])):
            scores[index] = found

    def _score_prompts(
        self,
        prompts: Sequence[np.ndarray],
        owners: Sequence[tuple[int, int]],
        response_ids: Sequence[np.ndarray],
        temperature: float,
        scores: list[np.ndarray],
    ) -> None:
        """One pass over the prompts, then passes over their responses; `owners` are (prompt row, response index)."""
        device = self.decoder.device
        # Without their last tokens: each response's pass begins with it, because it predicts the response's first token. A
        # prompt of one token leaves nothing here, but a pass needs a column.
        columns = max([1, *(len(prompt) - 1 for prompt in prompts)])
        ids = padded([prompt[:-1] for prompt in prompts], columns=columns, device=device)
        positions = torch.arange(columns, device=device).expand_as(ids)
        prefix = CausalAttention(self.decoder.spec, *ids.shape, keep=True, dtype=self.decoder.attention_dtype)
        self.decoder.store_only(ids.flatten(), positions.flatten(), prefix)
        lengths_P = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        lengths = [len(response_ids[index]) for _, index in owners]
        for batch in length_batches(lengths, token_budget=self.token_budget):
            # An empty response has no token to score: it keeps the empty array that `scores` began with.
            chosen = [owners[item] for item in batch if lengths[item]]
            if chosen:
                found = self._score_responses(prompts, prefix, lengths_P, chosen, response_ids, temperature)
                for (_, index), log_probs in zip(chosen, found):
                    scores[index] = log_probs

    def _score_responses(
        self,
        prompts: Sequence[np.ndarray],
        prefix: CausalAttention,
        lengths_P: Tensor,
        owners: Sequence[tuple[int, int]],
        response_ids: Sequence[np.ndarray],
        temperature: float,
    ) -> list[np.ndarray]:
        device = self.decoder.device
        targets = [np.asarray(response_ids[index]) for _, index in owners]
        inputs = [np.concatenate((prompts[row][-1:], target[:-1])) for (row, _), target in zip(owners, targets)]
        columns = max(len(target) for target in targets)
        rows_B = torch.tensor([row for row, _ in owners], device=device)
        ids, wanted = (padded(table, columns=columns, device=device) for table in (inputs, targets))
        offset = torch.arange(columns, device=device)
        positions = lengths_P[rows_B][:, None] + offset
        lengths = [len(target) for target in targets]
        real = offset < torch.tensor(lengths, device=device)[:, None]
        # Padding behind a response may lie beyond the tables of positions; no real token sees it.
        positions = torch.where(real, positions, 0)
        attend = SharedPrefixAttention(self.decoder.spec, prefix, rows_B, lengths_P, columns)
        hidden = self.decoder.hidden(ids.flatten(), positions.flatten(), attend)
        flat = self._log_probs(hidden[real.flatten()], wanted[real], temperature)
        return np.split(flat.cpu().numpy(), np.cumsum(lengths)[:-1])

    def _log_probs(self, hidden: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
        spec, head = self.decoder.spec, self.decoder.weights.head
        return chosen_log_probs(hidden, head, tokens_N, temperature=temperature, softcap=spec.logit_cap)[0]


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


def packed_batches(
    prompts: Sequence[np.ndarray],
    groups: Sequence[Sequence[int]],
    response_ids: Sequence[np.ndarray],
    *,
    token_budget: int,
) -> Iterator[dict[int, list[int]]]:
    """Prompts with some of their responses, at most `token_budget` tokens at once (a longer one alone); empty responses, of
    which there is nothing to score, are left out."""
    pairs = [(row, index) for row, members in enumerate(groups) for index in members if len(response_ids[index])]

    def cost(batch: Sequence[tuple[int, int]], pair: tuple[int, int]) -> int:
        row, index = pair
        shared = bool(batch) and batch[-1][0] == row  # the responses of a prompt follow each other
        return len(response_ids[index]) + (0 if shared else len(prompts[row]))

    for batch in split_by_budget(pairs, max_tokens=token_budget, cost=cost):
        members_of: dict[int, list[int]] = {}
        for row, index in batch:
            members_of.setdefault(row, []).append(index)
        yield members_of


class LoraReferenceScorer:
    """Log-probs under the base model, which is the reference of a LoRA run: no second model is kept.

    Prompts are shared as in training.
    """

    def __init__(self, model: PreTrainedModel, *, token_budget: int) -> None:
        self.policy = PolicyModel(model)
        self.token_budget = token_budget

    def load(self, weights: Weights) -> None:
        raise RuntimeError("the reference of a LoRA run is its base model: reference.reset_every must be 0.")

    @torch.no_grad()
    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        """float32 log-probs of each response's tokens after its prompt."""
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(response_ids)
        with adapter_off(self.policy.model):
            for part in self._parts(prompt_ids, response_ids):
                found = self._score([prompt_ids[i] for i in part], [response_ids[i] for i in part], temperature)
                for index, own in zip(part, found):
                    scores[index] = own
        return scores

    def _parts(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> list[list[int]]:
        """Indices per pass, equal prompts side by side; empty responses have nothing to score and are left out."""
        by_prompt = sorted(range(len(prompts)), key=lambda index: prompts[index].tobytes())
        return split_by_budget(
            [index for index in by_prompt if len(responses[index])],
            max_tokens=self.token_budget,
            # An upper bound: every response is charged its prompt, also where it shares it.
            cost=lambda _, index: len(prompts[index]) + len(responses[index]),
        )

    def _score(
        self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        groups: dict[bytes, list[Tensor]] = {}
        own: dict[bytes, Tensor] = {}
        for prompt, response in zip(prompts, responses):
            own.setdefault(prompt.tobytes(), torch.from_numpy(prompt.astype(np.int64)))
            groups.setdefault(prompt.tobytes(), []).append(torch.from_numpy(response.astype(np.int64)))
        packed = pack(
            list(own.values()), list(groups.values()), share_prompts=self.policy.packed, device=self.policy.device
        )
        log_probs = self.policy.forward(packed, temperature=temperature).log_pi_N.float().cpu().numpy()
        # Packed prompt by prompt, which is the order of `responses` because `_parts` puts equal prompts side by side.
        return np.split(log_probs, np.cumsum([len(response) for response in responses])[:-1])
