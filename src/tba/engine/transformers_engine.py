"""The engine for models the native one does not know: transformers' own forward pass and cache.

Same contract, same random numbers, same log-probs as the native engine; only slower. Requests are decoded in batches, each
until its last response has finished. Prompts are left-padded to the longest, each is read once for all of its samples, and
rows that have finished leave the batch when they are half of it: as far as the model's own cache gives what plain passes
give, which is tried once with a few tokens (`cache_abilities`).

Axes: R responses of a batch, B rows that are still in it, P prompts, T tokens of the longest sequence, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tba.engine.contract import Engine, Update
from tba.engine.sampling import (
    Response,
    SamplingNeeds,
    SamplingState,
    responses_of,
    sample,
    sampling_needs,
    token_log_probs,
)
from tba.models.load import first_line, load_published
from tba.models.packed_check import own_logits
from tba.models.text_part import switch_length
from tba.types import Completion, Request, Sampling, Weights

logger = logging.getLogger("tba.engine")

CACHES = ("past_key_values", "cache_params")
"""Names under which models give back, and take, what they keep of the tokens they have read: keys and values, or states."""
LEAST_GAP, LARGEST_SHARE = 1e-6, 1e-3
"""Gap to a plain pass that is rounding in fp32: in total variation distance, and as a share of how far the distributions
after different sequences lie apart. A model that says nearly the same after everything hides what is wrong."""
COARSE_GAP, COARSE_SHARE = 0.03, 0.5
"""The same in half precision, whichever is less."""


class TransformersEngine(Engine):
    """Engine that decodes with `model` itself. The model must therefore be a copy that is not trained."""

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_ids: Collection[int],
        seed: int,
        max_length: int,
        slots: int = 128,
        update: Update = "in_flight",
        version: int = 0,
    ) -> None:
        """`slots` is the number of responses that are decoded together, unless one request asks for more."""
        self.model: Any = model.eval()
        config: Any = model.config
        size = int(config.get_text_config().vocab_size)
        super().__init__(
            stop_ids=stop_ids, seed=seed, slots=slots, max_length=max_length, vocabulary=size, update=update
        )
        self.version = version
        self.device = next(model.parameters()).device
        self._stop_ids = torch.tensor(sorted(self.stop_ids), device=self.device)
        self._abilities: CacheAbilities | None = None
        self._running: ResponseBatch | None = None

    @property
    def abilities(self) -> CacheAbilities:
        """Abilities of the model's cache, tried when they are first needed."""
        if self._abilities is None:
            self._abilities = cache_abilities(self.model)
        return self._abilities

    def clone_for_evaluation(self) -> TransformersEngine:
        other = TransformersEngine(self.model, version=self.version, **self.options)
        other._abilities = self._abilities  # the same model: nothing is tried twice
        return other

    @torch.no_grad()
    def score(
        self, prompt_ids: Sequence[np.ndarray], response_ids: Sequence[np.ndarray], temperature: float
    ) -> list[np.ndarray]:
        scores = []
        for prompt, response in zip(prompt_ids, response_ids):
            # The last token predicts nothing. Where angles change with the length, reading it could change the others.
            ids = torch.from_numpy(np.concatenate((prompt, response))[:-1].astype(np.int64)).to(self.device)
            targets = torch.from_numpy(np.asarray(response, dtype=np.int64)).to(self.device)
            logits_TV = own_logits(self.model, ids[None], len(response))[0]
            heat = torch.full(targets.shape, temperature, device=self.device)
            scores.append(token_log_probs(logits_TV, targets, heat).cpu().numpy())
        return scores

    def _generate(
        self,
        requests: Iterator[Request | None],
        samples_per_prompt: int,
        sampling: Sampling,
        between_steps: Callable[[], None] | None,
    ) -> Iterator[Completion]:
        for chosen in self._batches(requests, samples_per_prompt):
            options: Any = {"stop_ids": self.stop_ids, "version": self.version}
            found = [responses_of(request, samples_per_prompt, sampling, **options) for request in chosen]
            yield from (completion for _, completions in found for completion in completions)
            responses = [response for own, _ in found for response in own]
            if not responses:
                continue
            # No request joins a batch under way: slots that fall free stay empty until its last response has finished.
            batch = self._running = ResponseBatch(self.model, responses, self.abilities, seed=self.seed)
            # Before `between_steps`, which may load weights and open spans of its own.
            batch.open_spans(self.version)
            while batch.open_rows:
                if between_steps is not None:
                    between_steps()
                yield from batch.step(self.stop_ids, self._stop_ids)
            self._running = None
            self._load_pending()

    def _batches(self, requests: Iterator[Request | None], samples_per_prompt: int) -> Iterator[list[Request]]:
        """Requests that are decoded together: as many as there are now, up to `slots` responses."""
        # `most` counts requests, each of which stands for `samples_per_prompt` responses.
        most, waiting = max(1, self.slots // max(1, samples_per_prompt)), deque[Request]()
        for request in requests:
            if request is not None:
                waiting.append(request)
            # A None says that nothing may start now: what has been read is decoded instead of waiting for a full batch.
            while waiting and (request is None or len(waiting) >= most):
                yield self._next_batch(waiting, most)
        while waiting:
            yield self._next_batch(waiting, most)

    def _next_batch(self, waiting: deque[Request], most: int) -> list[Request]:
        lengths = [len(request.prompt.token_ids) + len(request.prefix_ids) for request in waiting]
        chosen, left = list[Request](), list[Request]()
        for request, length in zip(waiting, lengths):
            # The oldest request is always among the chosen, so none waits for ever.
            fits = length == lengths[0] or self.abilities.pads
            (chosen if fits and len(chosen) < most else left).append(request)
        waiting.clear()
        waiting.extend(left)
        return chosen

    def _stop(self) -> None:
        self._running = None

    def _any_unfinished(self) -> bool:
        return self._running is not None

    def _use(self, weights: Weights) -> None:
        load_published(self.model, weights.tensors)
        self.version = weights.version
        if self._running is not None:
            self._running.open_spans(weights.version)


class ResponseBatch:
    """Responses that are decoded together, between two decode steps.

    Where the model's rotary angles change beyond some length (longrope), the cached keys, which have the old ones, are
    thrown away there, and everything is read again, as in transformers' `generate`. Rows of such a batch have equal lengths.
    """

    def __init__(self, model: Any, responses: list[Response], abilities: CacheAbilities, *, seed: int) -> None:
        self.model, self.responses, self.abilities = model, responses, abilities
        self.device = next(model.parameters()).device
        self.switch = switch_length(model.config)
        self.open_rows = set(range(len(responses)))
        self.rows = list(range(len(responses)))
        """Number of the response of each row."""
        # By identity: samples of one request begin alike, prefix included, and share one pass over the prompt.
        requests = {id(response.request): response for response in responses}
        places = {key: place for place, key in enumerate(requests)}
        self._prompts_R = torch.tensor([places[id(response.request)] for response in responses], device=self.device)
        self._ids_PT, self._mask = left_padded([first.sequence for first in requests.values()], self.device)
        self.is_padded = not bool(self._mask.all())
        if not abilities.selects:  # every response reads its prompt itself
            self._ids_PT, self._mask = self._ids_PT[self._prompts_R], self._mask[self._prompts_R]
            self._prompts_R = torch.arange(len(responses), device=self.device)
        self._cache: dict[str, Any] = {}
        """State that the model keeps of the tokens it has read, by the name of the argument; empty = none."""
        self._columns: list[tuple[Tensor, Tensor, Tensor]] = []
        """Tokens, behaviour and policy log-probs [R] of each step; rows that have left keep what they had."""
        self._settings = SamplingState.of(responses, seed, self.device)
        self._needs = [sampling_needs(response.sampling) for response in responses]

    def open_spans(self, version: int) -> None:
        for row in self.open_rows:
            self.responses[row].open_span(self._num_tokens(row), version)

    @torch.no_grad()
    def step(self, stop_ids: frozenset[int], stop_tensor: Tensor) -> list[Completion]:
        """A token for every row -> responses that have ended with it; the batch shrinks when half of its rows have."""
        # Three forms of a step: the newest token with a cache; the prompts, once; all that is there, read again.
        rows_B = torch.tensor(self.rows, device=self.device)
        if self._cache:
            ids, newest = self._columns[-1][0][rows_B][:, None], True
        else:  # each prompt once; at the switch, or without a cache, prompt and response so far of each row
            ids, newest = self._ids_PT, False
            if self._columns:
                response = torch.stack([tokens for tokens, _, _ in self._columns], dim=1)[rows_B]
                ids = torch.cat([ids[self._prompts_R[rows_B]], response], dim=1)
        places = self.abilities.arguments(self._mask, is_padded=self.is_padded, newest=newest)
        output = self.model(input_ids=ids, **self._cache, **places, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        self._cache = kept_cache(output) if self.abilities.caches else {}
        # After the pass over the prompts the cache has P rows: it is spread over the R responses.
        if not self._columns and self.abilities.selects:
            self._select(self._prompts_R)
            logits = logits[self._prompts_R]
        needs = SamplingNeeds(*(any(flags) for flags in zip(*(self._needs[row] for row in self.rows))))
        # min_new_tokens matters only at the beginning, so this flag is worked out anew for every step.
        early = any(self._num_tokens(row) < self.responses[row].sampling.min_new_tokens for row in self.rows)
        settings = self._settings.rows(rows_B, len(self._columns))
        self._append(rows_B, sample(logits, settings, stop_tensor, needs._replace(forbidden=early)))
        return self._take_finished(stop_ids)

    def _append(self, rows_B: Tensor, sampled: Sequence[Tensor]) -> None:
        fills, size = (0, float("nan"), float("nan")), (len(self.responses),)
        tokens, behaviour, policy = (
            part.new_full(size, fill).index_copy_(0, rows_B, part) for part, fill in zip(sampled, fills)
        )
        self._columns.append((tokens, behaviour, policy))
        # The mask grows with the token that the next step feeds, in rows that have finished as well.
        self._mask = nn.functional.pad(self._mask, (0, 1), value=True)
        if self.switch is not None and self._mask.shape[1] == self.switch + 1:
            self._cache = {}

    def _take_finished(self, stop_ids: frozenset[int]) -> list[Completion]:
        tokens, broken = self._columns[-1][0].tolist(), self._columns[-1][2].isnan().tolist()
        finished = [
            row
            for row in sorted(self.open_rows)
            if tokens[row] in stop_ids
            or broken[row]  # nothing can follow: `Response.completion` raises
            or self._num_tokens(row) >= self.responses[row].sampling.max_new_tokens
        ]
        self.open_rows.difference_update(finished)
        done: list[Completion] = []
        if finished:
            # Read from the device at once, for all that have ended.
            tables = (torch.stack(part, dim=1)[finished].cpu().numpy() for part in zip(*self._columns))
            for row, chosen, *log_probs in zip(finished, *tables):
                response = self.responses[row]
                unknown = np.full(response.num_prefix_tokens, np.nan, dtype=np.float32)
                ids = np.concatenate((response.request.prefix_ids, chosen)).astype(np.int32)
                behaviour, policy = (np.concatenate((unknown, own)) for own in log_probs)
                done.append(response.completion(ids, behaviour, policy, stop_ids))
        # At half only: choosing rows copies the cache of those that stay.
        if self.abilities.selects and self.open_rows and 2 * len(self.open_rows) <= len(self.rows):
            # A place is a row of the batch now; a row number names a response for good.
            kept = [place for place, row in enumerate(self.rows) if row in self.open_rows]
            self._select(torch.tensor(kept, device=self.device))
            self.rows = [self.rows[place] for place in kept]
        return done

    def _num_tokens(self, row: int) -> int:
        return self.responses[row].num_prefix_tokens + len(self._columns)

    def _select(self, places: Tensor) -> None:
        for cache in self._cache.values():
            cache.batch_select_indices(places)
        self._mask = self._mask[places]


def left_padded(sequences: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [P, T] and which of them are real; padding has id 0."""
    longest = max(map(len, sequences))
    ids, real = np.zeros((len(sequences), longest), np.int64), np.zeros((len(sequences), longest), bool)
    for row, sequence in enumerate(sequences):
        ids[row, longest - len(sequence) :], real[row, longest - len(sequence) :] = sequence, True
    return torch.from_numpy(ids).to(device), torch.from_numpy(real).to(device)


def kept_cache(output: Any) -> dict[str, Any]:
    """State that a model keeps of the tokens it has read, by the name of the argument."""
    kept = ((name, getattr(output, name, None)) for name in CACHES)
    return {name: cache for name, cache in kept if cache is not None}


# --- what may be done with a model's own cache: nothing in a config says it --------------------------------------------


class CacheAbilities(NamedTuple):
    """Abilities that give the same as plain passes over each sequence alone. Models that keep states instead of keys may see
    padding, and some caches select the rows of their keys and forget those of their states."""

    takes_positions: bool
    """Whether the model takes the positions of tokens as an argument. Without it some models (Bamba) count wrongly."""
    caches: bool
    """Reading a token with the cache of those before it; otherwise everything is read again for each token."""
    selects: bool = False
    """Repeating rows of the cache, and putting them in another order; otherwise every response reads its prompt itself."""
    pads: bool = False
    """Prompts of different lengths in one batch; otherwise those of one length are decoded together."""

    def arguments(self, mask: Tensor, *, is_padded: bool, newest: bool) -> dict[str, Tensor]:
        """Mask and positions of the tokens of all columns, or of the last one alone, as far as the model wants them."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)  # among the real ones of a row; 0 for padding
        places = {"position_ids": positions[:, -1:] if newest else positions} if self.takes_positions else {}
        return places | ({"attention_mask": mask} if is_padded else {})


def cache_abilities(model: Any) -> CacheAbilities:
    """Try a model with a few tokens."""
    plain = CacheAbilities("position_ids" in inspect.signature(model.forward).parameters, caches=True)
    if not _is_exact(model, plain, (6,)):
        return plain._replace(caches=False)
    # Rows of one length come together to where rotary angles change with the length.
    pads = switch_length(model.config) is None and _is_exact(model, plain, (4, 11, 7))
    return plain._replace(selects=_is_exact(model, plain, (6, 6), rows=(1, 0, 1)), pads=pads)


@torch.no_grad()
def _is_exact(model: Any, abilities: CacheAbilities, lengths: Sequence[int], rows: Sequence[int] | None = None) -> bool:
    """Whether sequences of these lengths, read together but for their last tokens, and then these with the cache, get the
    distributions that each has alone; between the two passes `rows` of the cache are chosen."""
    size, generator = int(model.config.get_text_config().vocab_size), torch.Generator().manual_seed(0)
    sequences = [torch.randint(size, (length,), generator=generator).numpy() for length in lengths]
    device, is_padded = next(model.parameters()).device, len(set(lengths)) > 1
    try:
        ids, mask = left_padded([sequence[:-1] for sequence in sequences], device)
        first = model(input_ids=ids, **abilities.arguments(mask, is_padded=is_padded, newest=False), use_cache=True)
        logits_BV, cache = first.logits[:, -1], kept_cache(first)
        if rows is not None:
            chosen = torch.tensor(rows, device=device)
            for part in cache.values():
                part.batch_select_indices(chosen)
            sequences, logits_BV, mask = [sequences[row] for row in rows], logits_BV[chosen], mask[chosen]
        mask = nn.functional.pad(mask, (0, 1), value=True)
        last = torch.tensor([[int(sequence[-1])] for sequence in sequences], device=device)
        places = abilities.arguments(mask, is_padded=is_padded, newest=True)
        second = model(input_ids=last, **places, **cache, use_cache=True)
    except Exception as error:  # a model's code fails in its own ways when it is given what it was not written for
        what = "caching" if len(lengths) == 1 else "padding" if rows is None else "selecting rows"
        logger.info("decoding is slower: %s failed with %s: %s", what, type(error).__name__, first_line(error))
        return False
    # The two distributions at hand: after all tokens but the last, and after the last, which was read with the cache.
    logits_B2V = torch.stack((logits_BV, second.logits[:, -1]), dim=1)
    gaps, spreads = [], []
    for sequence, logits_2V in zip(sequences, logits_B2V):
        ids = torch.from_numpy(sequence).to(device)[None]
        plain_TV = model(input_ids=ids, use_cache=False).logits[0].float().softmax(-1)
        gaps.append(_distance(logits_2V.float().softmax(-1), plain_TV[-2:]))
        # How much one token changes the distribution of this model: the scale against which a gap is judged.
        spreads.append(_distance(plain_TV[1:], plain_TV[:-1]))
    gap, spread = float(torch.stack(gaps).mean()), float(torch.stack(spreads).mean())
    is_coarse = logits_B2V.dtype != torch.float32
    return gap <= (min(COARSE_GAP, COARSE_SHARE * spread) if is_coarse else LEAST_GAP + LARGEST_SHARE * spread)


def _distance(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs().sum(-1).mean() / 2
