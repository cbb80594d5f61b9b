"""A tool and a reward: the policy learns to ask the calculator, and to believe it.

tba train configs/calculator.yaml
"""


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: One number.
        b: The other number.
    """
    return int(a) * int(b)


def right(completions, answer, **columns):
    """1 where the policy's last message is the product. A completion is all messages of its episode."""
    return [float(ends_with(messages, product)) for messages, product in zip(completions, answer)]


def ends_with(messages, answer):
    last = messages[-1] if messages else {}
    # A turn that calls the tool once more is no answer.
    return last.get("role") == "assistant" and not last.get("tool_calls") and last["content"].strip() == answer


right.per_sample = True
