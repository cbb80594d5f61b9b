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
        self._first = self._read = 0
        """Text of the tokens before `_read` is known; it is decoded again from `_first` on, because the text of a token
        may depend on the token before it."""
        self._held = ""
        """The end of the known text that may be the beginning of a stop string."""
        self.num_tokens: int | None = None
        """Number of tokens that count; None = the response has not ended."""
        self.is_stopped = False
        """Whether a stop string or one of these stop tokens ended it."""
        self.whole = ""
        """All text so far."""

    def read(self, token_ids: Sequence[int], *, is_complete: bool) -> str:
        """The new text, given all tokens so far."""
        text = self._read_on(token_ids, is_complete)
        self.whole += text
        return text

    def _read_on(self, token_ids: Sequence[int], is_complete: bool) -> str:
        if self.num_tokens is not None:
            return ""
        ids = self._until_stop_id(list(token_ids))
        is_complete = is_complete or self.is_stopped
        before, held = (self._first, self._read), self._held
        text = held + self._new_text(ids, is_complete)
        ends = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            end, place = min(ends)
            self.is_stopped = True
            self.num_tokens = self._tokens_until(text[:end], ids, before, held)
            return text[:place]
        if is_complete:
            self.num_tokens = len(ids)
            return text
        kept = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _until_stop_id(self, ids: list[int]) -> list[int]:
        """The tokens up to the first stop token."""
        for place in range(self._read, len(ids)) if self._stop_ids else ():
            if ids[place] in self._stop_ids:
                self.is_stopped = True
                return ids[: place + 1]
        return ids

    def _new_text(self, ids: list[int], is_complete: bool) -> str:
        text = self._text_after(ids, self._first, self._read)
        if not text or (text.endswith(INCOMPLETE) and not is_complete):
            return ""  # more tokens will tell
        self._first, self._read = self._read, len(ids)
        return text

    def _text_after(self, ids: list[int], first: int, read: int) -> str:
        known = self._decode(ids[first:read]) if read > first else ""
        return self._decode(ids[first:])[len(known) :]

    def _tokens_until(self, text: str, ids: list[int], before: tuple[int, int], held: str) -> int:
        """Number of tokens whose text first begins with this one."""
        first, read = before
        for count in range(read + 1, len(ids)):
            if (held + self._text_after(ids[:count], first, read)).startswith(text):
                return count
        return len(ids)

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Number of characters at the end of a text with which a stop string begins."""
        lengths = range(min(len(stop) - 1, len(text)), 0, -1)
        return next((length for length in lengths if text.endswith(stop[:length])), 0)
