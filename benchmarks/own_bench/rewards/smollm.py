"""The one word that was asked for."""

Chat = list[list[dict[str, str]]]


def correct(completions: Chat, answer: list[str], **columns: object) -> list[float]:
    """1 for the word alone; capitals and a full stop do not matter."""
    replies = (reply[0]["content"].strip().rstrip(".").lower() for reply in completions)
    return [float(reply == right.lower()) for reply, right in zip(replies, answer)]
