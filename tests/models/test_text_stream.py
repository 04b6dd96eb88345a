"""Text as tokens come, held against decoding all of them at once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.models.tokenizer import TextStream, Tokenizer


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    def decode(self, ids, *, skip_special_tokens=True):
        return bytes(ids).decode(errors="replace")


@given(st.text(alphabet="aé€😀\ufffd", max_size=12), st.lists(st.integers(1, 6), max_size=40))
def test_pieces_of_any_size_give_the_text(text, sizes):
    stream, ids, told = TextStream(Bytes()), list(text.encode()), []
    for size in sizes:
        told.append(stream.push(*ids[:size]))
        ids = ids[size:]
    told += [stream.push(*ids), stream.finish()]
    assert "".join(told) == text


def test_whole_characters_of_a_piece_do_not_wait_for_the_open_one():
    stream, (first, *rest) = TextStream(Bytes()), "é".encode()
    assert stream.push(*b"abc", first) == "abc"
    assert stream.push(*rest, *b"d") == "éd"


def test_half_a_character_at_the_end_is_told():
    stream = TextStream(Bytes())
    assert stream.push(*"€".encode()[:2]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_decoding_equals_transformers(target_folder, skip_special_tokens):
    from transformers import AutoTokenizer

    reference, draw = AutoTokenizer.from_pretrained(target_folder), random.Random(0)
    tokenizer = Tokenizer(target_folder, len(reference))
    for _ in range(200):
        ids = [draw.randrange(len(reference)) for _ in range(20)] + [0, 1, 2]
        want = reference.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) == want
