"""Conversations of a session: which go on from an earlier call, and that its tokens are kept as they were generated."""

import numpy as np
from chat_families import family_tokenizer

from tba.serve.chat import Call, Chat, template_messages
from tba.tasks.environments.chat_format import ChatFormat

TOKENIZER = family_tokenizer("qwen_2_5")
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
FORM = ChatFormat(TOKENIZER, [TOOL])
ASKED = [{"role": "user", "content": "tool"}]
WRITTEN = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 7}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "a door"}


def chat_of(messages, kind="look"):
    return Chat(kind=kind, form=FORM, messages=template_messages(messages))


def call_of(messages, ids, message):
    chat = chat_of(messages)
    none = np.zeros(len(ids), np.float32)
    (said,) = template_messages([message])
    return Call(
        id="a",
        prompt_ids=np.array(chat.prompt_ids((), [STOP]), np.int32),
        token_ids=np.array(ids, np.int32),
        policy_log_probs=none,
        behaviour_log_probs=none,
        version_spans=((0, 0),),
        finish="stop",
        chat=chat,
        message=said,
    )


def odd_ids(text):
    """Ids of a text as a policy may write it: character by character, which no tokenizer gives."""
    return [token for letter in text for token in TOKENIZER(letter, add_special_tokens=False)["input_ids"]]


def test_messages_of_a_client_become_what_templates_take():
    said = {"role": "assistant", "content": None, "tool_calls": [WRITTEN], "refusal": None}
    assert template_messages([*ASKED, said, RESULT]) == [
        {"role": "user", "content": "tool"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"n": 7}}}],
        },
        {"role": "tool", "name": "look", "content": "a door"},
    ]


def test_what_was_generated_is_not_tokenised_again():
    text = '<tool_call>\n{"name": "look", "arguments": {"n": 7}}\n</tool_call>'
    said = {"role": "assistant", "content": None, "tool_calls": [WRITTEN]}
    ids = [*odd_ids(text), STOP]
    call = call_of(ASKED, ids, said)
    found = chat_of([*ASKED, said, RESULT]).prompt_ids([call], [STOP])
    between = FORM.next_turn_ids([{"role": "tool", "name": "look", "content": "a door"}])
    assert found == [*call.prompt_ids.tolist(), *ids, *between.tolist()]
    # A turn that was cut off gets the end-of-turn token of the template.
    cut = call_of(ASKED, ids[:-1], said)
    assert chat_of([*ASKED, said, RESULT]).prompt_ids([cut], [STOP]) == found


def test_control_tokens_in_results_are_words():
    said = {"role": "assistant", "content": "too"}
    call = call_of(ASKED, [*odd_ids("too"), STOP], said)
    found = chat_of([*ASKED, said, {"role": "user", "content": "<|im_end|>"}]).prompt_ids([call], [STOP])
    assert found.count(STOP) == len([token for token in call.prompt_ids if token == STOP]) + 2


def test_the_longest_earlier_conversation_is_gone_on_from():
    said, more = {"role": "assistant", "content": "too"}, {"role": "user", "content": "and"}
    first = call_of(ASKED, [*odd_ids("too"), STOP], said)
    second = call_of([*ASKED, said, more], [*odd_ids("tool"), STOP], {"role": "assistant", "content": "tool"})
    new = [*ASKED, said, more, {"role": "assistant", "content": " tool\n"}, more]
    found = chat_of(new).prompt_ids([first, second], [STOP])
    so_far = [*second.prompt_ids.tolist(), *second.token_ids.tolist()]
    assert found[: len(so_far)] == so_far


def test_what_breaks_a_conversation_is_said():
    said, more = {"role": "assistant", "content": "too"}, {"role": "user", "content": "and"}
    call = call_of(ASKED, [*odd_ids("too"), STOP], said)

    def why(messages, kind="look"):
        return chat_of(messages, kind).why_apart(call)

    assert why([*ASKED, said, more]) == ""
    assert "other tools" in why([*ASKED, said, more], "none")
    assert why([{"role": "user", "content": "other"}, said, more]) == (
        "its message 0, of the role user, is not as it was"
    )
    assert "message 1, of the role assistant" in why([*ASKED, {"role": "assistant", "content": "summary"}, more])
    assert "no message after" in why([*ASKED, said])
    assert "did not write" in why([*ASKED, said, more, said, more])
    # Then the template writes it all anew.
    assert chat_of([*ASKED, more]).prompt_ids([call], [STOP]) == FORM.prompt_ids([*ASKED, more]).tolist()
