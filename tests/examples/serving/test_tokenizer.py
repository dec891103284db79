"""Text goes in and comes out as it was, whole or byte by byte."""

import pytest

from examples.serving.tokenizer import VOCABULARY, Special, TextStream, encode, encode_chat


def streamed(tokens):
    stream = TextStream()
    return [*(stream.feed(token) for token in tokens), stream.end()]


@pytest.mark.parametrize("text", ["", "plain", "naïve", "日本語 🙂", "a\nb\0c"])
def test_text_comes_back(text):
    tokens = encode(text)
    assert tokens[0] == Special.BEGIN
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert "".join(streamed(tokens)) == text


def test_a_character_is_said_when_it_is_complete():
    assert streamed(encode("é!")) == ["", "", "é", "!", ""]


def test_what_is_no_text_becomes_a_replacement_character():
    assert streamed([0xC3]) == ["", "\ufffd"]
    assert streamed([0xC3, ord("a")]) == ["", "\ufffda", ""]
    assert streamed([Special.END, ord("a"), Special.USER]) == ["", "a", "", ""]


def test_half_a_character_that_json_can_hold_is_taken():
    assert len(encode("\ud83d")) == 4


def test_a_chat_marks_who_speaks():
    tokens = encode_chat([("system", "s"), ("user", "hi")])
    expected = [Special.BEGIN, Special.SYSTEM, ord("s"), Special.CLOSE, Special.USER, *b"hi", Special.CLOSE]
    assert tokens == [*expected, Special.ASSISTANT]
