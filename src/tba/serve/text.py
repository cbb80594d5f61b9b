"""The text of a response while it grows: what is new in it, and where a stop string or a stop token ends it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

INCOMPLETE = "\ufffd"
"""What decoders write for the first bytes of a character whose last bytes are still to come."""


class ResponseText:
    """The text of one response.

    It does not depend on how many tokens come at a time: a stop string ends it with the first token that completes one.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], *, stop: Sequence[str] = (), stop_ids: Collection[int] = ()
    ) -> None:
        self._decode, self._stop, self._stop_ids = decode, stop, frozenset(stop_ids)
        self._ids: list[int] = []
        self._first = self._known = 0
        """The text of the tokens before `_known` is known; they are decoded again from `_first` on, because the text of a
        token may depend on the token before it."""
        self._held = ""
        """The end of the known text that may be the beginning of a stop string."""
        self.whole = ""
        """All text so far, without what is held back."""
        self.num_tokens: int | None = None
        """Number of tokens that count; None = the response has not ended."""
        self.is_stopped = False
        """Whether a stop string or one of these stop tokens ended it."""

    def read(self, new_ids: Sequence[int], *, is_complete: bool) -> str:
        """The new text that the next tokens bring; `is_complete` = no more will come."""
        if self.num_tokens is not None:
            return ""
        self._add(new_ids)
        text = self._ended(is_complete or self.is_stopped)
        self.whole += text
        return text

    def _add(self, new_ids: Sequence[int]) -> None:
        for place, token in enumerate(new_ids):
            if token in self._stop_ids:
                self.is_stopped = True
                new_ids = new_ids[: place + 1]
                break
        self._ids += new_ids

    def _ended(self, is_complete: bool) -> str:
        """The new text up to a stop string, and but for what may begin one."""
        first, known, held = self._first, self._known, self._held
        text = held + self._new_text(is_complete)
        ends = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            end, place = min(ends)
            self.is_stopped = True
            counts = range(known + 1, len(self._ids))
            # The first token with which the text begins as the one that was stopped does.
            fitting = (n for n in counts if (held + self._text_of(first, known, n)).startswith(text[:end]))
            self.num_tokens = next(fitting, len(self._ids))
            return text[:place]
        if is_complete:
            self.num_tokens = len(self._ids)
            return text
        kept = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _new_text(self, is_complete: bool) -> str:
        text = self._text_of(self._first, self._known, len(self._ids))
        if not text or (text.endswith(INCOMPLETE) and not is_complete):
            return ""  # more tokens will tell
        self._first, self._known = self._known, len(self._ids)
        return text

    def _text_of(self, first: int, known: int, end: int) -> str:
        """Text of tokens `known` to `end`, decoded behind those from `first` on."""
        before = self._decode(self._ids[first:known]) if known > first else ""
        return self._decode(self._ids[first:end])[len(before) :]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Number of characters at the end of a text with which a stop string begins."""
        lengths = range(min(len(stop) - 1, len(text)), 0, -1)
        return next((length for length in lengths if text.endswith(stop[:length])), 0)
