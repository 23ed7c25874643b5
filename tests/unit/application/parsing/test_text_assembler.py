import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.parsing.reply_parser import TextAssembler
from semantic.domain.events import ScoredToken
from semantic.domain.sampling import TokenLogprob

pytestmark = pytest.mark.unit


def pieces_of(data: list[bytes], stops: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    assembler = TextAssembler(data.__getitem__, stops)
    pieces: list[str] = []
    for token in range(len(data)):
        delta = assembler.feed(token)
        pieces += [delta.text] if delta else []
        if assembler.stop:
            break
    last = assembler.finish()
    return pieces + ([last.text] if last else []), assembler.stop


@given(st.lists(st.binary(max_size=4), max_size=40))
def test_the_pieces_joined_are_the_decoding_of_all_bytes(data: list[bytes]) -> None:
    pieces, _ = pieces_of(data)
    assert "".join(pieces) == b"".join(data).decode("utf-8", "replace")


@given(st.text(max_size=30), st.data())
def test_no_half_character_is_ever_shown(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    bounds = [0, *cuts, len(raw)]
    pieces, _ = pieces_of([raw[a:b] for a, b in itertools.pairwise(bounds)])
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    "data, stop, text",
    [
        (
            [b" leading", b"\n", b"    ", b"if x:\n", b"\t\t", b"y "],
            None,
            " leading\n    if x:\n\t\ty ",
        ),
        ([b"one ", b"E", b"N", b"D two"], "END", "one "),  # split over tokens, and not shown
        ([b"one EN"], None, "one EN"),  # only looked like one
        ([b"x", b"\xf0\x9f"], "\ufffd", "x"),  # completed by the end of the bytes
    ],
)
def test_spaces_survive_and_stop_strings_are_cut_out(
    data: list[bytes], stop: str | None, text: str
) -> None:
    pieces, hit = pieces_of(data, ("END", "\ufffd"))
    assert ("".join(pieces), hit) == (text, stop)


def test_logprobs_come_with_the_text_they_complete() -> None:
    assembler = TextAssembler([b"\xc3", b"\xa9"].__getitem__)
    assert assembler.feed(0, TokenLogprob(0, -1.0, ((0, -1.0),))) is None
    delta = assembler.feed(1, TokenLogprob(1, -2.0))
    assert delta is not None
    assert delta.text == "é"
    assert delta.logprobs == (
        ScoredToken(b"\xc3", -1.0, ((b"\xc3", -1.0),)),
        ScoredToken(b"\xa9", -2.0),
    )


def test_special_tokens_are_text_only_where_they_are_visible() -> None:
    assembler = TextAssembler([b"", b"hi", b""].__getitem__, (), {0: b"<tool_call>"})
    logprob = TokenLogprob(0, -1.0, ((2, -2.0),))
    delta = assembler.feed(0, logprob)
    assert delta is not None
    assert delta.text == "<tool_call>"
    assert delta.logprobs == (ScoredToken(b"<tool_call>", -1.0, ((b"", -2.0),)),)
    assert assembler.feed(2) is None
