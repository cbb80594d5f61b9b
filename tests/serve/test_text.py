"""Text of responses that grow, with the words of real tokenizers."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from tba.models.paths import resolve_path
from tba.serve.text import ResponseText


@pytest.fixture(scope="module")
def decode():
    tokenizer = AutoTokenizer.from_pretrained(resolve_path("tba:arithmetic"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def ids():
    tokenizer = AutoTokenizer.from_pretrained(resolve_path("tba:arithmetic"))
    return tokenizer("12+34=46", add_special_tokens=False)["input_ids"]


def pieces(text, ids, sizes):
    """What `read` gives when tokens come in pieces of these sizes."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [
        text.read(ids[start : start + size], is_complete=start + size >= len(ids)) for start, size in zip(starts, sizes)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_pieces_join_to_the_whole(decode, ids, size):
    found = pieces(ResponseText(decode), ids, [size] * -(-len(ids) // size))
    assert "".join(found) == decode(ids)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_string_ends_the_text_before_it_and_the_tokens_behind_it(decode, ids, size):
    text = ResponseText(decode, stop=["34", "=4"])
    found = pieces(text, ids, [size] * -(-len(ids) // size))
    whole = decode(ids)
    place = whole.find("34")
    assert "".join(found) == whole[:place]
    assert text.is_stopped
    counts = [count for count in range(len(ids)) if decode(ids[:count]).startswith(whole[: place + 2])]
    assert text.num_tokens == counts[0]


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none(decode):
    text = ResponseText(lambda ids: "".join(map(chr, ids)), stop=["abc"])
    found = [text.read([ord(letter) for letter in new], is_complete=False) for new in ("xa", "b", "d")]
    assert found == ["x", "", "abd"]
    assert text.whole == "xabd"


def test_a_stop_token_is_the_last_that_counts():
    text = ResponseText(lambda ids: "".join(map(chr, ids)), stop_ids=[ord("b")])
    assert text.read([ord(letter) for letter in "aabaa"], is_complete=False) == "aab"
    assert (text.num_tokens, text.is_stopped) == (3, True)


def test_a_character_of_several_tokens_comes_whole():
    """The bytes of an e with an accent, as two tokens, then x."""
    tokenizer = Tokenizer(models.BPE({"Ã": 0, "©": 1, "x": 2}, []))
    tokenizer.decoder = decoders.ByteLevel()
    text = ResponseText(tokenizer.decode)
    assert [text.read([token], is_complete=token == 2) for token in (0, 1, 2)] == ["", "é", "x"]
    assert ResponseText(tokenizer.decode).read([0], is_complete=True) == "\ufffd"
