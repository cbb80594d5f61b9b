"""Newer weights in a searcher: seen between decode steps, copied, loaded, and compared with what the trainer computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from tba.generate.contract import Engine
from tba.models.weights import CANARY_TOKENS, CanaryCheck, canary_tokens, kl_estimate
from tba.runtime.ends import SearcherEnds
from tba.search.loop import Searcher
from tba.types import Weights

MAX_UNCHECKED = 4
"""Versions in a row that may be used and overtaken before their canary comes."""


class WeightLoader:
    """Loads newer weights into the engine and makes sure that they arrived."""

    def __init__(
        self, ends: SearcherEnds, engine: Engine, report: Callable[[float], None] = lambda mismatch_kl: None
    ) -> None:
        """`report` is told how far engine and trainer are apart at each version that is compared."""
        self._engine = engine
        self._report = report
        self._canary = CanaryCheck()
        self._tokens = canary_tokens(engine.vocabulary, CANARY_TOKENS)
        self._source = ends.weights
        self._loaded = -1
        """The version given to the engine last; under `drain` it may not be in use yet."""
        self._checked = -1
        """The version whose canary was compared last."""
        self._unchecked = 0
        """Versions given to the engine since then."""
        self._canaries: dict[int, np.ndarray] = {}
        """Canaries of versions that the engine may come to use. The trainer may write over one before that: while large
        weights are fetched, or while the engine waits for its responses to end."""
        self._thread: ThreadPoolExecutor | None = None
        """Fetches weights that take long, beside the decode steps."""
        self._fetching: Future[Weights] | None = None

    def load_newer(self) -> None:
        """Never waits: under `drain` the engine loads later, a version's canary comes a little after its weights, and large
        weights are copied and checked beside the decode steps."""
        newest = self._source.newest_version
        self._note_canary(newest)
        self._check_when_there()  # what is in use, before newer weights wait for their turn
        if newest > self._loaded and self._is_in_use and self._may_load(newest):
            self._load_beside() if self._source.takes_long else self._load()
        self._check_when_there()

    @property
    def sees_newer(self) -> bool:
        """Whether there are newer weights than the engine has."""
        return self._source.newest_version > self._engine.version

    @property
    def _is_in_use(self) -> bool:
        """Whether the engine computes with what it was given last."""
        return self._engine.version == self._loaded and not self._engine.has_pending

    def check_first(self) -> None:
        """Both sides' canaries set the tolerance. A searcher that starts late begins with a later version."""
        self._load()
        self._check_when_there()

    def _may_load(self, version: int) -> bool:
        """After too many versions in a row without a comparison only one whose canary is there."""
        return self._unchecked < MAX_UNCHECKED or version in self._canaries

    def _note_canary(self, version: int) -> None:
        """Keep a version's canary, where it has come."""
        if version not in self._canaries and (found := self._source.canary(version)) is not None:
            self._canaries = {known: canary for known, canary in self._canaries.items() if known >= self._loaded}
            self._canaries[version] = found

    def _load(self) -> None:
        weights = self._take(self._source.fetch())
        if weights.version > self._engine.version:
            self._give(weights)

    def _load_beside(self) -> None:
        """Begin to fetch, or give the engine what has been fetched by now. The engine has read the copy before, so it may be
        written."""
        if self._fetching is None:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="weights")
            self._fetching = self._thread.submit(self._source.fetch)
        elif self._fetching.done():
            fetched, self._fetching = self._fetching, None
            self._give(self._take(fetched.result()))

    def _give(self, weights: Weights) -> None:
        self._engine.load(weights)
        if self._is_in_use:  # under `drain` it will read them later
            self._source.loaded()

    def _take(self, weights: Weights) -> Weights:
        """Note what was fetched."""
        self._loaded = weights.version
        self._unchecked += 1
        return weights

    def _check_when_there(self) -> None:
        """A version that is overtaken before its canary comes goes unchecked; the next one's is compared. Nothing is while
        newer weights wait for the engine: those in use were compared before."""
        version = self._engine.version
        if version == self._checked or not self._is_in_use:
            return
        self._note_canary(version)
        published = self._canaries.get(version)
        if published is not None:
            computed = self._engine.score([self._tokens[:1]], [self._tokens[1:]], 1.0)[0]
            self._report(kl_estimate(computed, published))  # first: what is too much is seen too
            self._canary.check(published=published, computed=computed, version=version)
            self._checked, self._unchecked = version, 0


class ReferenceLoader:
    """Loads newer references, where they are reset."""

    def __init__(self, ends: SearcherEnds, searcher: Searcher) -> None:
        self._source = ends.references
        self._searcher = searcher

    def load_newer(self) -> None:
        """Never waits. A group is scored at once, so it never mixes references."""
        if self._source is not None and self._source.newest_version > self._searcher.scorer.reference_version:
            self._searcher.load_reference(self._source.fetch())
