"""Where stop strings are found in text that arrives in tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.stop_strings import StopMatcher


def byte_decode(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: every token is one byte."""
    return bytes(ids).decode("utf-8", errors="replace")


def word_decode(ids: Sequence[int]) -> str:
    """A tokenizer that drops the space before the first word, as sentencepiece decoders do."""
    return "".join((" one", " two", " three")[each] for each in ids).removeprefix(" ")


def feed(matcher: StopMatcher, ids: Sequence[int]) -> tuple[int, int] | None:
    """(tokens pushed, characters before the stop) of the first match."""
    for count, each in enumerate(ids, 1):
        if (at := matcher.push(each)) is not None:
            return count, at
    return None


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "some textEND and more", (12, 9)),
        (["b"], "abc", (2, 1)),
        (["zzz"], "some text", None),
        (["\n\n", "text"], "some text\n\n", (9, 5)),
        (["é!"], "caféé!", (8, 4)),
        (["x" * 300], "ab" + "x" * 299 + "y" + "x" * 300, (602, 302)),
        (["aab"], "aaab", (4, 1)),
        (["ab", "0123456789"], "xxab", (4, 2)),
    ],
)
def test_a_stop_string_over_many_tokens_is_cut_where_it_begins(
    stops: list[str], text: str, expected: tuple[int, int] | None
) -> None:
    # trap 31
    assert feed(StopMatcher(byte_decode, stops), text.encode()) == expected


def test_of_two_stops_in_one_token_the_leftmost_counts() -> None:
    # trap 31
    matcher = StopMatcher(lambda ids: "".join(("say ", "x STOP y END")[each] for each in ids), ["END", "STOP"])
    assert feed(matcher, [0, 1]) == (2, 6)


def test_a_stop_before_an_unfinished_character_is_seen_at_once() -> None:
    matcher = StopMatcher(
        lambda ids: b"".join((b"ab", b"STOP\xf0\x9f", b"\x98\x80")[i] for i in ids).decode(errors="replace"), ["STOP"]
    )
    assert feed(matcher, [0, 1, 2]) == (2, 2)


def test_bytes_of_a_character_split_over_tokens_are_not_taken_for_text() -> None:
    # trap 32
    assert feed(StopMatcher(byte_decode, ["😀"]), "ok 😀".encode()) == (7, 3)
    assert feed(StopMatcher(byte_decode, ["\ufffd"]), "ok 😀".encode()) is None


def test_spaces_that_depend_on_the_position_are_decoded_in_context() -> None:
    # trap 32
    assert feed(StopMatcher(word_decode, [" two three"]), [0, 1, 2]) == (3, 3)
    assert feed(StopMatcher(word_decode, [" one"]), [0, 1, 0]) == (3, 7)


def test_a_match_below_min_tokens_does_not_count() -> None:
    # trap 30
    assert feed(StopMatcher(byte_decode, ["ab"], min_tokens=4), b"ababab") == (4, 2)
    assert feed(StopMatcher(byte_decode, ["ab"], min_tokens=3), b"abcccc") is None


def test_a_match_held_back_does_not_count_later_beside_a_longer_stop() -> None:
    # trap 30
    assert feed(StopMatcher(byte_decode, ["ab", "0123456789"], min_tokens=3), b"abcd") is None


def marked_decode(ids: Sequence[int]) -> str:
    """As `word_decode`, with a special token (3) that has no text."""
    return word_decode([each for each in ids if each != 3])


def test_a_special_token_in_the_text_does_not_shift_what_follows() -> None:
    # traps 31, 32
    ids = [0, 3, 1, 2]
    assert feed(StopMatcher(marked_decode, [" two"]), ids) == (3, 3)
    assert marked_decode(ids)[:3] == "one"


def spoilt_decode(ids: Sequence[int]) -> str:
    """Byte fallback as llama's: one bad byte turns every byte of its run into a replacement character."""
    text = bytes(ids)
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "".join(chr(each) if each < 128 else "\ufffd" for each in text)


def test_the_cut_is_counted_in_the_text_of_the_whole_output() -> None:
    # traps 31, 32
    ids = [*"😀".encode(), 255, *b" and STOP"]
    count, at = feed(StopMatcher(spoilt_decode, ["STOP"]), ids) or (0, 0)
    assert count == len(ids)
    assert spoilt_decode(ids)[:at] == spoilt_decode(ids).partition("STOP")[0]


def test_bytes_that_are_never_text_stay_cheap_to_decode() -> None:
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return byte_decode(ids)

    assert feed(StopMatcher(decode, ["x"]), [255] * 500) is None
    assert max(lengths) < 12
