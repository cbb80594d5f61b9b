"""Our decoder made from a transformers model: static tensors, which named tensor fills which part of them, rotation tables;
and the checks that it computes what the model computes.

A model that the decoder cannot run is refused with `UnsupportedModel` and served by transformers instead: an unknown model
type, activation or tensor, rotary angles that change within the lengths asked for, or a next-token distribution other than
that of the model's own forward pass. That last check is over 12 tokens: what a model does only further on (a window beyond
that) rests on its config being read rightly in families.py, and on tests/engine/test_engine_families.py.

`check_decoder` compares one pass over whole sequences. `check_engine` has the engine itself at work: it prefills, forks into
slots and decodes, in its own dtype and layout of the cache, with the kernels that will choose the tokens, CUDA graphs
included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.engine.contract import Engine
from tba.engine.decoder.decoder import ACTIVATIONS, Decoder
from tba.engine.decoder.families import FAMILIES, Names
from tba.engine.decoder.layers import CausalAttention
from tba.engine.decoder.spec import (
    DecoderSpec,
    DecoderWeights,
    DenseMlp,
    Experts,
    Layer,
    Linear,
    Norm,
    Placement,
    UnsupportedModel,
)
from tba.models.text_part import is_tied, name_of, switch_length, text_parameters, trunk_of
from tba.types import Prompt, Request, Sampling

logger = logging.getLogger("tba.models")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest mean total variation distance to the model's own next-token distribution, by the coarser dtype of the two."""
LONGEST_WINDOW = 64
"""Longest window that the check sees the end of: longer ones would make it slow on a large model."""
NUM_TOKENS, SAMPLES = 5, 3
"""Number of tokens and samples of each prompt: in bf16 single tokens may be far off, the mean of all is not."""


def make_decoder(model: PreTrainedModel, *, max_length: int, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Copy a transformers model into our decoder, for sequences up to `max_length`, and check it. Of one that also sees
    images it is the part that text goes through."""
    spec, names = describe(model)
    rotations = _rotations(model, spec, max_length, device)
    weights = _Builder(model, spec, names, dtype, device).build()
    if weights.positions is not None and max_length > weights.positions.shape[0]:
        raise ValueError(
            f"max_length={max_length} is beyond the model's {weights.positions.shape[0]} learned positions: "
            "shorten prompts (task.max_prompt_tokens) or responses (generate.max_new_tokens)."
        )
    decoder = Decoder(spec, weights, rotations)
    # By the same placements as every published bundle: a wrong one fails the check below.
    decoder.load(model.state_dict())
    # Tensors in their places say nothing of what a family computes with them: this does.
    check_decoder(model, decoder, max_length)
    return decoder


def native_spec(model: PreTrainedModel) -> DecoderSpec:
    """The spec of a model whose tensors the decoder knows. Nothing is computed, so that the model may be without memory
    (device meta); what it computes is checked when it is loaded."""
    spec, names = describe(model)
    _Builder(model, spec, names, torch.bfloat16, torch.device("meta")).build()
    return spec


def describe(model: PreTrainedModel) -> tuple[DecoderSpec, Names]:
    config: Any = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}")
    make_spec, names = FAMILIES[config.model_type]
    spec = make_spec(config, tied=is_tied(model))
    if spec.activation not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {spec.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if spec.experts is not None and not hasattr(F, "grouped_mm"):
        raise UnsupportedModel(f"experts need PyTorch 2.10 or newer (grouped_mm), this is {torch.__version__}")
    if spec.rotary_dim % 2:
        raise UnsupportedModel(f"{spec.rotary_dim} numbers of a head are rotated, which is odd")
    if config is not model.config:
        names = names.within(f"{name_of(model, trunk_of(model))}.")
    return spec, names


def _rotations(model: PreTrainedModel, spec: DecoderSpec, max_length: int, device: torch.device) -> dict[str, Tensor]:
    kinds = sorted(set(spec.rotary_kinds) - {""})
    if not kinds:
        return {}
    # The model's module and not a formula: scaling types (linear, yarn, llama3) change angles and amplitude.
    rotary: Any = next((m for name, m in trunk_of(model).named_modules() if name.endswith("rotary_emb")), None)
    if rotary is None:
        raise UnsupportedModel(f"model type {spec.family!r} has no rotary_emb module to take its angles from")
    limit = switch_length(model.config)
    if limit is not None and max_length > limit:
        # Keys in a cache would go stale.
        raise UnsupportedModel(
            f"its rotary angles change for sequences of more than {limit} tokens, and these may have {max_length}"
        )
    like = next(rotary.buffers())
    positions = torch.arange(max_length, device=like.device)[None]
    x = torch.zeros(1, dtype=torch.float32, device=like.device)
    tables: dict[str, Tensor] = {}
    for kind in kinds:
        with torch.no_grad():
            cos, sin = rotary(x, positions) if kind == "all" else rotary(x, positions, kind)
        # Most families repeat the angles for both halves of a head.
        half = spec.rotary_dim // 2
        tables[kind] = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float()).to(device)
    return tables


class _Builder:
    """Allocates the static tensors of one model and notes which named tensor fills which part."""

    def __init__(
        self, model: PreTrainedModel, spec: DecoderSpec, names: Names, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.names, self.dtype, self.device = spec, names, dtype, device
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        text = text_parameters(model)
        # Parts that see images, and buffers: a bundle may hold them, and the decoder has no place for them.
        beside = {name for name, _ in model.named_parameters() if name not in text}
        self.ignored = {name for name, _ in model.named_buffers()} | beside
        self.placements: dict[str, Placement] = {}

    def build(self) -> DecoderWeights:
        names, spec = self.names, self.spec
        embedding = self._table(names.embedding)
        if spec.tied:
            self.ignored.add(f"{names.head}.weight")
        weights = DecoderWeights(
            embedding=embedding,
            positions=None if names.positions is None else self._table(names.positions),
            layers=[self._layer(index, f"{names.layers}.{index}.") for index in range(spec.num_layers)],
            final_norm=self._norm(names.final_norm, spec.hidden_size, scale=spec.final_scale),
            head=embedding if spec.tied else self._table(names.head),
            placements=self.placements,
            ignored=frozenset(self.ignored),
        )
        # A tensor without a place is a computation that the decoder would leave out in silence.
        unused = [name for name in self.shapes if name not in self.placements and name not in self.ignored]
        if unused:
            raise UnsupportedModel(f"{spec.family} model has a tensor the decoder does not know: {unused[0]}")
        return weights

    def _layer(self, index: int, prefix: str) -> Layer:
        names, spec = self.names, self.spec
        head_dims = (spec.head_dim, spec.head_dim)
        if spec.query_key_norm == "all":
            head_dims = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)
        has_experts = spec.experts is not None and spec.experts.layers[index]
        # Query, key and value in matrices of their own, or all in one, in either of two orders.
        arranges = [self._pair_heads, self._pair_heads, _same]
        if len(names.qkv) == 1:
            arranges = [self._split_interleaved if names.interleaved else self._pair_stacked]

        def norm(name: str | None, wanted: bool = True) -> Norm | None:
            return self._norm(prefix + name, spec.hidden_size) if wanted and name is not None else None

        def head_norm(name: str, size: int) -> Norm | None:
            return None if spec.query_key_norm == "none" else self._norm(prefix + name, size, self._pair_heads)

        return Layer(
            attention_norm=norm(names.attention_norm),
            qkv=self._linear([(prefix + name, arrange) for name, arrange in zip(names.qkv, arranges)]),
            output=self._linear([(prefix + names.output, _same)]),
            mlp_norm=norm(names.mlp_norm),
            mlp=self._experts(prefix) if has_experts else self._dense(prefix),
            sinks=self._stack([(prefix + names.sinks, _same)], _same, torch.float32) if spec.sinks else None,
            query_norm=head_norm(names.query_norm, head_dims[0]),
            key_norm=head_norm(names.key_norm, head_dims[1]),
            attention_post_norm=norm(names.attention_post_norm, spec.post_norms),
            mlp_post_norm=norm(names.mlp_post_norm, spec.post_norms),
        )

    def _dense(self, prefix: str) -> DenseMlp:
        return DenseMlp(
            up=self._linear([(prefix + name, _same) for name in self.names.up]),
            down=self._linear([(prefix + self.names.down, _same)]),
        )

    def _experts(self, prefix: str) -> Experts:
        router = self._linear([(prefix + self.names.router, _same)])
        arrange = _gate_first_of_pairs if self.names.mixed_experts else _same
        turned = _transpose if self.names.mixed_experts else _same
        base = prefix + self.names.experts
        biased = f"{base}.gate_up_proj_bias" in self.shapes
        return Experts(
            router=router,
            up=self._stack([(f"{base}.gate_up_proj", arrange)], turned, self.dtype),
            down=self._stack([(f"{base}.down_proj", _same)], turned, self.dtype),
            up_bias=self._stack([(f"{base}.gate_up_proj_bias", arrange)], _same, self.dtype) if biased else None,
            down_bias=self._stack([(f"{base}.down_proj_bias", _same)], _same, self.dtype) if biased else None,
        )

    def _pair_heads(self, rows: Tensor) -> Tensor:
        """Put the two halves that rotate together side by side: within a head 0, h, 1, h + 1, ... Queries and keys are
        reordered alike, so their products stay the same."""
        half, rest = self.spec.rotary_dim // 2, self.spec.head_dim - self.spec.rotary_dim
        heads = rows.unflatten(0, (-1, self.spec.head_dim))
        pairs = torch.stack((heads[:, :half], heads[:, half : 2 * half]), dim=2).flatten(1, 2)
        if rest:
            pairs = torch.cat((pairs, heads[:, self.spec.head_dim - rest :]), dim=1)
        return pairs.flatten(0, 1)

    def _pair_stacked(self, rows: Tensor) -> Tensor:
        """All queries, then all keys, then all values, in one matrix."""
        query, key = self.spec.num_heads * self.spec.head_dim, self.spec.num_kv_heads * self.spec.head_dim
        return torch.cat((self._pair_heads(rows[: query + key]), rows[query + key :]))

    def _split_interleaved(self, rows: Tensor) -> Tensor:
        query, key, value = rows.unflatten(0, (self.spec.num_heads, 3, self.spec.head_dim)).unbind(1)
        query, key = self._pair_heads(query.flatten(0, 1)), self._pair_heads(key.flatten(0, 1))
        return torch.cat((query, key, value.flatten(0, 1)))

    def _linear(self, sources: list[tuple[str, Callable[[Tensor], Tensor]]]) -> Linear:
        turned = _transpose if self.names.transposed else _same
        weight = self._stack([(f"{name}.weight", arrange) for name, arrange in sources], turned, self.dtype)
        if f"{sources[0][0]}.bias" not in self.shapes:
            return Linear(weight=weight)
        bias = self._stack([(f"{name}.bias", arrange) for name, arrange in sources], _same, self.dtype)
        return Linear(weight=weight, bias=bias)

    def _stack(
        self,
        sources: list[tuple[str, Callable[[Tensor], Tensor]]],
        turned: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        # Shapes only, on the meta device: nothing is allocated to learn how a source is turned.
        shapes = [turned(torch.empty(self._shape(name), device="meta")).shape for name, _ in sources]
        target = torch.zeros(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype, device=self.device)
        start = 0
        for (name, arrange), shape in zip(sources, shapes):
            self._place(name, target[start : start + shape[0]], _composed(turned, arrange))
            start += shape[0]
        return target

    def _table(self, name: str) -> Tensor:
        return self._stack([(f"{name}.weight", _same)], _same, self.dtype)

    def _norm(
        self, name: str, size: int, arrange: Callable[[Tensor], Tensor] | None = None, *, scale: float = 1.0
    ) -> Norm:
        weight, offset, arranged = torch.zeros(size, device=self.device), self.spec.norm_offset, arrange or _same
        as_given = offset == 0.0 and scale == 1.0  # of most families: a copy, which casts too
        values = arranged if as_given else lambda given: (arranged(given).float() + offset) * scale
        self._place(f"{name}.weight", weight, values)
        bias = torch.zeros(size, device=self.device) if self.spec.norm == "layer" else None
        if bias is not None:
            self._place(f"{name}.bias", bias, _same)
        return Norm(weight=weight, bias=bias, epsilon=self.spec.norm_epsilon)

    def _place(self, name: str, target: Tensor, arrange: Callable[[Tensor], Tensor]) -> None:
        self.placements[name] = Placement(target=target, shape=self._shape(name), arrange=arrange)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise UnsupportedModel(f"{self.spec.family} model lacks the tensor {name}")
        return self.shapes[name]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _transpose(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2)


def _gate_first_of_pairs(rows: Tensor) -> Tensor:
    """Gate and up in turns along the second axis -> all of the gate, then all of up."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


def _composed(first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: then(first(tensor))


# --- checks against the model ----------------------------------------------------------------------------------------


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
    is_coarse = torch.bfloat16 in (decoder.dtype, next(model.parameters()).dtype)
    return TOLERANCE[torch.bfloat16 if is_coarse else torch.float32]


@torch.no_grad()
def _check_against(model: nn.Module, decoder: Decoder, max_length: int) -> None:
    """Log-probs of a few random tokens must be those of the model's own forward pass; of more where windows are short."""
    short = [window for window in decoder.spec.windows if window is not None and window <= LONGEST_WINDOW]
    length = min(max(12, *(window + 4 for window in short), 0), max_length)
    # The same tokens at every start, so that a model that passes once passes again.
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
    sampling = Sampling(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
    rng, requests = np.random.default_rng(0), list[Request]()
    # Two lengths, so that rows are padded and positions differ between slots; the shorter one is continued greedily.
    for index, length in enumerate((7, 4)):
        ids = rng.integers(decoder.spec.vocab_size, size=min(length, max_length - num_tokens)).astype(np.int32)
        prompt = Prompt(id=f"check {index}", token_ids=ids, text="")
        requests.append(Request(prompt=prompt, sampling=replace(sampling, greedy=index == 1)))
    # The engine's own loop: queue, prefill, slots and sampling all take part.
    completions = list(engine.generate(requests, samples_per_prompt=SAMPLES, sampling=sampling))
    prompts = {request.prompt.id: request.prompt.token_ids for request in requests}
    rows = [torch.from_numpy(np.concatenate((prompts[done.prompt_id], done.token_ids))).long() for done in completions]
    ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # padding comes last: no real token sees it
    log_probs = _own_log_probs(model, ids_BT)[:, :-1].gather(2, ids_BT[:, 1:, None])[..., 0]
    # Column t predicts token t + 1: the columns of a response begin at its prompt's last token.
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


@torch.no_grad()
def _own_log_probs(model: nn.Module, ids_BT: Tensor) -> Tensor:
    # Dropout would make the model's own log-probs random.
    was_training, _ = model.training, model.eval()
    logits = model(input_ids=ids_BT.to(next(model.parameters()).device), use_cache=False).logits
    model.train(was_training)
    return logits.float().log_softmax(-1).cpu()
