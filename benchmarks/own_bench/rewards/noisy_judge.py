"""Counting animals, rewarded for the form of the answer, by a judge who errs, and for brevity.

The judge errs on one in five pairs of question and response, chosen by a hash: asked again about the same response it says
the same again, as a deterministic judge does, so sampling the response twice does not average its error away.
"""

import hashlib

ERRS = 0.2
SHORT, LONG = 4, 16
"""Words up to which brevity is 1, and from which it is 0."""
WEIGHTS = {"judged": 0.6, "form": 0.2, "brevity": 0.2}


def judged(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 where the judge holds the answer for right."""
    rows = zip(prompts, completions, answer)
    return [float(_is_right(text, right) != _errs(prompt, text)) for prompt, text, right in rows]


def form(completions: list[str], **columns: object) -> list[float]:
    """1 for a response that ends with `answer : NUMBER .`"""
    return [float(_given(text) is not None) for text in completions]


def brevity(completions: list[str], **columns: object) -> list[float]:
    """1 up to 4 words, 0 from 16, straight between."""
    return [min(1.0, max(0.0, (LONG - len(text.split())) / (LONG - SHORT))) for text in completions]


def true(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """What the weighted rewards would be with a judge who never errs."""
    right = [float(_is_right(text, wanted)) for text, wanted in zip(completions, answer)]
    parts = {"judged": right, "form": form(completions), "brevity": brevity(completions)}
    return [sum(WEIGHTS[name] * parts[name][index] for name in WEIGHTS) for index in range(len(completions))]


def _given(text: str) -> str | None:
    """The number of a response in the asked form."""
    words = text.split()
    formed = len(words) >= 4 and words[-4:-2] == ["answer", ":"] and words[-1] == "."
    return words[-2] if formed else None


def _is_right(text: str, answer: str) -> bool:
    """The last number said, in whatever form."""
    words = [word for word in text.split() if word != "."]
    return bool(words) and words[-1] == answer


def _errs(prompt: str, text: str) -> bool:
    digest = hashlib.blake2b(f"{prompt}\n{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64 < ERRS
