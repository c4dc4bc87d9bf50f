"""Stop strings are found at the token that completes them, wherever tokens and characters are cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from batchgen.text.stop_strings import StopStrings, cut_text
from batchgen.text.tokenizer import Tokenizer

END, UNKNOWN = 0, 10**6
ALPHABET = "abé東🙂 \n"


def as_written(text: str) -> str:
    """One character for each byte of ``text``, as a byte-level vocabulary writes it."""
    return "".join(part for part, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))


def make_tokenizer() -> Tokenizer:
    """A token for every byte, and some of several bytes that begin and end inside characters."""
    across = as_written("ab東b🙂\n a")
    parts = [across[:2], across[1:3], across[3:6], across[6:8], across[8:11], across[10:]]
    vocab = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *parts]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, merges=[]))
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


TOKENIZER = make_tokenizer()
BYTES = {byte: TOKENIZER._backend.token_to_id(byte) for byte in sorted(set(as_written(ALPHABET)))}
TOKENS = [END, UNKNOWN, *BYTES.values(), *range(257, TOKENIZER.vocab_size)]


def encoded(text: str) -> list[int]:
    """A token for each byte of ``text``."""
    return [BYTES[byte] for byte in as_written(text)]


def stops_at(tokenizer: Tokenizer, token_ids: Sequence[int], stop: tuple[str, ...]) -> tuple[int, str] | None:
    """The first token that completes a stop string, and which."""
    watch = StopStrings(tokenizer, stop)
    return next(((i, found) for i, token in enumerate(token_ids) if (found := watch.push(token)) is not None), None)


def looked_up(tokenizer: Tokenizer, token_ids: Sequence[int], stop: tuple[str, ...]) -> tuple[int, str] | None:
    """The same from the definition: decode every prefix from its start."""
    for i in range(len(token_ids)):
        text = tokenizer.showing_in(stop).decode(token_ids[: i + 1])
        found = [(text.find(item), -len(item), item) for item in stop if item in text]
        if found:
            return i, min(found)[2]
    return None


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(TOKENS), max_size=40) | st.text(ALPHABET, max_size=20).map(encoded),
    st.lists(
        st.text(ALPHABET + "\ufffd", min_size=1, max_size=4) | st.sampled_from(["<end>", "a<end>", "<end>é", "<end>"]),
        min_size=1,
        max_size=4,
    ).map(tuple),
)
@example(encoded("🙂")[:1] * 30 + encoded("🙂a"), ("🙂a",))
@example(encoded("🙂")[:1] * 6 + encoded("🙂a"), ("🙂a",))
@example([END, *encoded("a"), END, *encoded("b")], ("<end>b",))
@example(encoded("ab"), ("b", "ab"))  # the one that begins first
@example([TOKENIZER._backend.token_to_id("ab")], ("a", "ab"))  # and of those that begin together the longest
@example([*encoded("東")[:1], *[END, UNKNOWN] * 20, *encoded("東")[1:]], ("東",))
def test_a_text_stops_at_the_first_token_that_completes_a_string(token_ids: list[int], stop: tuple[str, ...]) -> None:
    found = stops_at(TOKENIZER, token_ids, stop)
    assert found == looked_up(TOKENIZER, token_ids, stop)
    if found is not None:
        upto = token_ids[: found[0] + 1]
        text = TOKENIZER.decode(upto, shown_in=found[1])
        assert cut_text(TOKENIZER.decode, upto, found[1]) == text[: text.index(found[1])].replace("<end>", "")


def test_a_match_that_was_ignored_does_not_count_again_and_stays_in_the_text() -> None:
    watch, token_ids = StopStrings(TOKENIZER, ("ab",)), encoded("ab ab é")
    assert [watch.push(token) for token in token_ids] == [None, "ab", None, None, "ab", None, None, None]
    assert cut_text(TOKENIZER.decode, token_ids[:5], "ab") == "ab "
    assert cut_text(TOKENIZER.decode, token_ids[:2], "ab") == ""


def test_a_character_that_stays_incomplete_is_no_new_text() -> None:
    watch, token_ids = StopStrings(TOKENIZER, ("\ufffd", "é")), encoded("🙂é")
    assert [watch.push(token) for token in token_ids] == ["\ufffd", None, None, None, "\ufffd", "é"]


@pytest.mark.parametrize(
    "token_ids", [encoded("a"), encoded("🙂"), encoded("🙂")[:1], encoded("🙂")[1:2], [UNKNOWN, END]]
)
def test_a_token_costs_the_same_however_long_the_text_is(token_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    watch = StopStrings(TOKENIZER, ("no such text",))
    for token in token_ids * 200:
        watch.push(token)
    assert max(lengths, default=0) < 20


def test_a_decoder_that_writes_the_first_token_otherwise_is_followed() -> None:
    vocab = {"<unk>": 0, "▁in": 1, "▁the": 2, "<0xC3>": 3, "<0xA9>": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([1, 2]) == "in the"
    assert stops_at(tokenizer, [1, 1, 2, 2], (" the the",)) == (3, " the the")
    assert stops_at(tokenizer, [1, 2, 3, 4, 1], ("theé",)) == (3, "theé")
    assert stops_at(tokenizer, [1, 2], (" in",)) is None
