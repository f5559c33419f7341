"""The one cut: the earliest end wins, wherever the blocks are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.stopping import Emission, Emitted, Stopper
from coordinator.text import TextCodec
from splitspec.errors import InvalidRequestError
from splitspec.types import FinishReason, Stop
from tests.coordinator.conftest import byte_id

EOS, STOP_TOKEN = 0, 300


@pytest.fixture(scope="session")
def codec(codecs: dict[str, TextCodec]) -> TextCodec:
    return codecs["byte level"]


def stopper(codec: TextCodec, stop: Stop | None = None, *, max_tokens: int = 100, room: int = 100) -> Stopper:
    return Stopper(
        stop or Stop(),
        codec.detokenizer(),
        eos_token_ids=frozenset({EOS}),
        max_tokens=max_tokens,
        room=room,
        special_stops=codec.special_stops(stop.stop_strings if stop else ()),
    )


def spelled(codec: TextCodec, text: str) -> list[int]:
    """The ids of each byte of ASCII text: one token a character."""
    ids = [codec.vocabulary.tokenizer.token_to_id({" ": "Ġ"}.get(character, character)) for character in text]
    assert None not in ids
    return [token for token in ids if token is not None]


def joined(emissions: Sequence[Emission]) -> Emission:
    """The emissions of consecutive blocks as one."""
    tokens = tuple(token for emission in emissions for token in emission.tokens)
    return replace(emissions[-1], tokens=tokens, text="".join(emission.text for emission in emissions))


def ids_of(emission: Emission) -> list[int]:
    return [token.token_id for token in emission.tokens]


def test_what_was_accepted_after_the_stop_appears_nowhere(codec: TextCodec) -> None:
    stop = Stop(stop_token_ids=frozenset({STOP_TOKEN}))
    emission = stopper(codec, stop, max_tokens=5).push([10, 11, STOP_TOKEN, 20, 21, 22])
    assert ids_of(emission) == [10, 11, STOP_TOKEN]
    assert emission.text == codec.decode([10, 11])
    assert emission.tokens[-1].text_end == len(emission.text)
    assert emission.finish is FinishReason.STOP_TOKEN


NUM_DRAFT_TOKENS = 4


@pytest.mark.parametrize("offset", range(NUM_DRAFT_TOKENS + 1))
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("reason", FinishReason)
def test_every_end_at_every_offset_of_a_block(
    codec: TextCodec, offset: int, before: int, reason: FinishReason
) -> None:
    block = spelled(codec, "abcde")
    first = spelled(codec, "xyz")[:before]
    kept, text = [*first, *block[: offset + 1]], "xyz"[:before] + "abcde"[: offset + 1]
    limits = {"max_tokens": 100, "room": 100}
    stop = Stop(stop_token_ids=frozenset({STOP_TOKEN}), stop_strings=("abcde"[offset],))
    match reason:
        case FinishReason.EOS | FinishReason.STOP_TOKEN:
            block[offset] = kept[-1] = EOS if reason is FinishReason.EOS else STOP_TOKEN
            text = text[:-1]
        case FinishReason.STOP_STRING:
            text = text[:-1]
        case FinishReason.MAX_TOKENS:
            limits["max_tokens"] = len(kept)
        case FinishReason.CONTEXT_LIMIT:
            limits["room"] = len(kept)
    if reason is not FinishReason.STOP_STRING:
        stop = replace(stop, stop_strings=())
    under_test = stopper(codec, stop, **limits)
    emission = joined([under_test.push(first), under_test.push(block)])
    assert (ids_of(emission), emission.text, emission.finish) == (kept, text, reason)
    assert emission.tokens[-1].text_end == len(text)
    with pytest.raises(ValueError, match=reason.name):
        under_test.push([1])


def test_at_one_position_the_order_is_that_of_the_reasons(codec: TextCodec) -> None:
    """Every end falls on the same token; taking away the first leaves the next."""
    ids = [*spelled(codec, "ab"), STOP_TOKEN]
    text = codec.decode([STOP_TOKEN])
    stop = Stop(stop_token_ids=frozenset({STOP_TOKEN}), stop_strings=(text,))

    def finish(stop: Stop, eos: set[int], *, max_tokens: int, room: int) -> FinishReason | None:
        under_test = Stopper(
            stop, codec.detokenizer(), eos_token_ids=frozenset(eos), max_tokens=max_tokens, room=room
        )
        return under_test.push(ids).finish

    limited = {"max_tokens": 3, "room": 3}
    assert finish(stop, {STOP_TOKEN}, **limited) is FinishReason.EOS
    assert finish(stop, set(), **limited) is FinishReason.STOP_TOKEN
    assert finish(replace(stop, stop_token_ids=frozenset()), set(), **limited) is FinishReason.STOP_STRING
    assert finish(Stop(), set(), **limited) is FinishReason.MAX_TOKENS
    assert finish(Stop(), set(), max_tokens=4, room=3) is FinishReason.CONTEXT_LIMIT
    assert finish(Stop(), set(), max_tokens=4, room=4) is None


def test_ignore_eos_goes_on_unless_the_id_is_a_stop_token_too(codec: TextCodec) -> None:
    ids = [*spelled(codec, "a"), EOS, *spelled(codec, "b")]
    going_on = stopper(codec, Stop(ignore_eos=True)).push(ids)
    assert (ids_of(going_on), going_on.text, going_on.finish) == (ids, "ab", None)
    stop = Stop(ignore_eos=True, stop_token_ids=frozenset({EOS}))
    stopped = stopper(codec, stop).push(ids)
    assert (ids_of(stopped), stopped.text, stopped.finish) == (ids[:2], "a", FinishReason.STOP_TOKEN)


@pytest.mark.parametrize(
    ("stop_strings", "text", "released", "matched"),
    [
        (("lo w",), "hello world", "hel", "lo w"),
        (("aab",), "aaab", "a", "aab"),
        (("abac",), "ababac", "ab", "abac"),
        (("cd", "bcde"), "abcde", "ab", "cd"),  # the earliest token completes it
        (("cd", "bcd", "d"), "abcde", "a", "bcd"),  # at one token the first in the text
        (("bc", "b"), "abc", "a", "b"),
        (("xyz", "yzq"), "wxyzq", "w", "xyz"),
    ],
)
def test_stop_strings(
    codec: TextCodec, stop_strings: tuple[str, ...], text: str, released: str, matched: str
) -> None:
    emission = stopper(codec, Stop(stop_strings=stop_strings)).push(spelled(codec, text))
    assert (emission.text, emission.stop_string) == (released, matched)
    assert emission.finish is FinishReason.STOP_STRING
    assert len(emission.tokens) == text.index(matched) + len(matched)
    assert emission.tokens[-1].text_end == len(released)


def test_a_stop_string_within_a_token_takes_all_of_the_tokens_text_after_it(codec: TextCodec) -> None:
    ids = codec.encode("Hello world")
    assert codec.decode(ids[:1]) == "Hello"
    emission = stopper(codec, Stop(stop_strings=("el", "ell"))).push(ids)
    assert emission == Emission((Emitted(ids[0], 1),), "H", FinishReason.STOP_STRING, "ell")


def test_the_beginning_of_a_stop_string_is_held_back_until_decided(codec: TextCodec) -> None:
    under_test = stopper(codec, Stop(stop_strings=("STOP",)))
    released = [under_test.push([token]) for token in spelled(codec, "aSTxSTO")]
    assert [emission.text for emission in released] == ["a", "", "", "STx", "", "", ""]
    assert [emission.tokens[0].text_end for emission in released] == [1, 1, 1, 4, 4, 4, 4]
    assert under_test.push([EOS]) == Emission((Emitted(EOS, 7),), "STO", FinishReason.EOS)


@pytest.mark.parametrize("limits", [{"max_tokens": 3}, {"room": 3}])
def test_a_limit_releases_what_was_held_back(codec: TextCodec, limits: dict[str, int]) -> None:
    emission = stopper(codec, Stop(stop_strings=("bcd",)), **limits).push(spelled(codec, "abcd"))
    assert emission.text == "abc"
    assert emission.tokens[-1].text_end == 3


def test_a_character_cut_by_a_limit_is_a_replacement_character(codec: TextCodec) -> None:
    half = codec.encode("😀")[:2]
    assert len(codec.encode("😀")) == 4
    emission = stopper(codec, max_tokens=3).push([*spelled(codec, "a"), *half])
    assert [token.text_end for token in emission.tokens] == [1, 1, 2]
    assert emission.text == "a\ufffd"


def test_a_stop_string_of_split_characters(codec: TextCodec) -> None:
    ids = codec.encode("ab😀b")
    emission = stopper(codec, Stop(stop_strings=("b😀",))).push(ids)
    assert (ids_of(emission), emission.text) == (ids[:-1], "a")


@pytest.mark.parametrize("end", ["eos", "max_tokens"])
def test_a_stop_string_that_only_the_end_decides(codecs: dict[str, TextCodec], end: str) -> None:
    """Byte tokens have text only when their run ends, here with the generation."""
    codec = codecs["byte fallback"]
    run = codec.encode("😀")[1:]
    assert len(run) == 4
    eos = codec.vocabulary.tokenizer.token_to_id("<|end|>")
    ids = [*run, eos] if end == "eos" and eos is not None else run
    under_test = Stopper(
        Stop(stop_strings=("😀",)),
        codec.detokenizer(),
        eos_token_ids=frozenset(ids[4:]),
        max_tokens=len(ids),
        room=100,
    )
    emission = under_test.push(ids)
    assert (ids_of(emission), emission.text) == (ids, "")
    assert (emission.finish, emission.stop_string) == (FinishReason.STOP_STRING, "😀")


def test_a_stop_string_that_is_a_special_token_matches_its_id(codec: TextCodec) -> None:
    user = codec.vocabulary.tokenizer.token_to_id("<|user|>")
    assert user is not None
    stop = Stop(stop_strings=("abx", "<|user|>"), ignore_eos=True)
    emission = stopper(codec, stop).push([*spelled(codec, "ab"), EOS, user, *spelled(codec, "c")])
    assert (emission.finish, emission.stop_string) == (FinishReason.STOP_STRING, "<|user|>")
    assert (emission.text, len(emission.tokens)) == ("ab", 4)
    # As any stop string it doesn't count before min_tokens, and comes after what ends the text before it.
    early = stopper(codec, replace(stop, min_tokens=3)).push([user, *spelled(codec, "ab")])
    assert early.finish is None
    held = stopper(codec, replace(stop, stop_strings=("\ufffd", "<|user|>")))
    assert held.push([*spelled(codec, "a"), byte_id(codec, 0xE2), user]).stop_string == "\ufffd"
    spelled_out = stopper(codec, stop).push(codec.encode_more("<|use") + spelled(codec, "r|>"))
    assert (spelled_out.finish, spelled_out.text) == (FinishReason.STOP_STRING, "")


@pytest.mark.parametrize("stop", ["<|user|>\n", "a<|end|>"])
def test_a_stop_string_with_a_special_token_inside_is_refused(codec: TextCodec, stop: str) -> None:
    with pytest.raises(InvalidRequestError, match="a special token alone") as raised:
        codec.special_stops([stop])
    assert raised.value.field == "stop.stop_strings"


def test_limits_below_one_are_refused(codec: TextCodec) -> None:
    with pytest.raises(ValueError, match="room 0"):
        stopper(codec, room=0)


def expected(codec: TextCodec, stop: Stop, ids: Sequence[int], max_tokens: int, room: int) -> Emission | None:
    """The end by the full text of each prefix, without text_end; None when there is none."""
    for count, token in enumerate(ids, start=1):
        before = codec.decode(ids[: count - 1])
        text = codec.decode(ids[:count])
        last = min(max_tokens, room) == count
        if token == EOS and not stop.ignore_eos:
            text, reason = before, FinishReason.EOS
        elif token in stop.stop_token_ids:
            text, reason = before, FinishReason.STOP_TOKEN
        elif last:
            reason = FinishReason.MAX_TOKENS if max_tokens == count else FinishReason.CONTEXT_LIMIT
        else:
            reason, text = None, text.removesuffix("\ufffd")
        matches = [(text.find(s), -len(s), s) for s in stop.stop_strings if s in text]
        matched = min(matches)[2] if matches else ""
        if matched:
            text, reason = text[: text.find(matched)], FinishReason.STOP_STRING
        if reason is not None:
            return Emission(tuple(Emitted(i, 0) for i in ids[:count]), text, reason, matched)
    return None


#: Any token, and more often the ends and the letters that stop strings are made of.
IDS = st.lists(
    st.integers(0, 330) | st.sampled_from([EOS, STOP_TOKEN, *range(36, 50)]), min_size=1, max_size=24
)
STOP_STRINGS = st.text("BCDEFGH", min_size=1, max_size=3) | st.just("\ufffd")
STOPS = st.builds(
    Stop,
    stop_token_ids=st.sampled_from([frozenset(), frozenset({STOP_TOKEN}), frozenset({EOS, 40})]),
    stop_strings=st.lists(STOP_STRINGS, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
)


@given(ids=IDS, stop=STOPS, max_tokens=st.integers(1, 30), room=st.integers(1, 30), data=st.data())
def test_any_blocks_give_the_same_cut_which_is_that_of_the_full_text(
    codec: TextCodec, ids: list[int], stop: Stop, max_tokens: int, room: int, data: st.DataObject
) -> None:
    whole = stopper(codec, stop, max_tokens=max_tokens, room=room).push(ids)

    cuts = data.draw(st.sets(st.integers(1, len(ids))).map(sorted))
    under_test, parts = stopper(codec, stop, max_tokens=max_tokens, room=room), []
    for start, stop_at in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        parts.append(under_test.push(ids[start:stop_at]))
        assert sum(len(part.text) for part in parts) == (parts[-1].tokens or parts[-2].tokens)[-1].text_end
        if parts[-1].finish is not None:
            break
    assert joined(parts) == whole

    end = expected(codec, stop, ids, max_tokens, room)
    if end is None:
        assert whole.finish is None
        assert ids_of(whole) == ids
        assert codec.decode(ids).startswith(whole.text)
    else:
        assert replace(end, tokens=()) == replace(whole, tokens=())
        assert ids_of(whole) == ids_of(end)
    assert not any(stop_string in whole.text for stop_string in stop.stop_strings)


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, 2), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6), (7, 7)])
@pytest.mark.parametrize("block", [1, 2, 7])
def test_a_stop_string_counts_from_min_tokens_on(
    codec: TextCodec, min_tokens: int, kept: int, block: int
) -> None:
    """One that begins earlier and is complete only then counts; what came before stays in the text."""
    ids = spelled(codec, "ababababa")
    under_test = stopper(codec, Stop(stop_strings=("ab", "ababx"), min_tokens=min_tokens), max_tokens=7)
    emissions = []
    for start in range(0, len(ids), block):
        emissions.append(under_test.push(ids[start : start + block]))
        if emissions[-1].finish is not None:
            break
    emission = joined(emissions)
    ended = kept < 7
    assert emission.finish is (FinishReason.STOP_STRING if ended else FinishReason.MAX_TOKENS)
    assert ids_of(emission) == ids[:kept]
    assert emission.text == "abababa"[: kept - 2 if ended else kept]
    assert [token.text_end for token in emission.tokens] == sorted(t.text_end for t in emission.tokens)
