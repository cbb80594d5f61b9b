"""An agent: a loop that knows OpenAI's client and nothing of tba. The policy behind it is trained to use the calculator.

pip install 'tba-rl[web]' openai
tba train --model tba:tools --data examples/environments/calculator.jsonl --agent examples/environments/agent.py:run \
    generate.max_new_tokens=48 generate.slots=64 train.max_steps=100 train.target_drift=0.1
"""

import json

import openai

MULTIPLY = {
    "name": "multiply",
    "description": "Multiply two whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
MOST_TURNS = 4


def run(base_url, api_key, messages, answer, **columns):
    """Play one episode and return its reward: 1 where the last message is the product."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MOST_TURNS):
            tools = [{"type": "function", "function": MULTIPLY}]
            found = client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = found.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip() == answer)
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)}
                for call in message.tool_calls
            ]
            messages = [*messages, message, *results]
    return 0.0


def multiply(arguments):
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (KeyError, TypeError, ValueError) as error:  # the policy may write anything: it reads what is wrong
        return f"{type(error).__name__}: {error}"
