"""Guides: what they force and allow, when they fail, what they share, and tokenizers they can work with."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest
import tokenizers
from guides import SAMPLE, allowed, complete_texts, sample_grammars, write
from hostile_grammars import FAILING, HOSTILE, REFUSED
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from batchgen.core.structured import canonical
from batchgen.text import grammar
from batchgen.text.grammar import Grammars, Guide
from batchgen.text.grammar_source import GrammarError
from batchgen.text.tokenizer import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def followed(grammars: Grammars, text: str, token_ids: list[int]) -> Guide:
    guide = grammars.begin(text, [])
    for token_id in token_ids:
        guide.push(token_id)
    return guide


def test_forced_tokens_are_masks_of_one_token_and_nothing_else_may_come(grammars: Grammars) -> None:
    text = canonical({"json": {"const": {"answer": "yes"}}})
    guide, forced = grammars.begin(text, []), []
    while guide.forced is not None:
        assert not guide.is_complete
        assert allowed(grammars, guide) == [guide.forced]
        forced.append(guide.forced)
        guide.push(guide.forced)
    assert grammars.tokenizer.decode(forced) == '{"answer": "yes"}'
    assert guide.is_complete
    assert guide.is_over
    other = grammars.begin(text, [])
    other.push(forced[0] + 1)
    assert "where the grammar allows another one only" in other.error
    assert not other.is_active


def test_masks_depend_on_the_text_alone_not_on_how_tokens_came(grammars: Grammars) -> None:
    """Pushed one by one with masks between, or all at once as after a resume."""
    text = canonical({"json": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}})
    tokens, _ = write(grammars, text, Random(3), most=40)
    stepwise = grammars.begin(text, [])
    for i, token in enumerate(tokens):
        whole = followed(Grammars(grammars.tokenizer, grammars.vocab_size, grammars.eos_token_ids), text, tokens[:i])
        assert (whole.forced, whole.is_complete) == (stepwise.forced, stepwise.is_complete)
        assert allowed(grammars, whole) == allowed(grammars, stepwise)
        stepwise.release()  # what it let go of is made anew
        stepwise.push(token)
        assert not stepwise.error


def test_waiting_guides_and_unused_grammars_hold_no_matcher(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_MAX_CHARS", 500)
    few = Grammars(grammars.tokenizer, grammars.vocab_size, grammars.eos_token_ids)
    texts = [canonical({"choice": [f"{i} " + "a" * 100, "b"]}) for i in range(12)]
    guides = [few.begin(text, []) for text in texts]
    for guide in guides:
        guide.release()
    assert all(guide._matcher is None for guide in guides)
    assert 0 < sum(map(len, few._compiled)) <= 500
    assert [allowed(few, guide) for guide in guides] == [allowed(grammars, grammars.begin(text, [])) for text in texts]


@pytest.mark.parametrize("num_grammars", [3, 12])  # one after another, and in threads
def test_masks_of_many_guides_are_those_of_each(grammars: Grammars, num_grammars: int) -> None:
    asked: list[dict[str, Any]] = [{"regex": f"[a-z]{{{i + 1},20}}x?"} for i in range(num_grammars)]
    asked[1::2] = [{"choice": [f"{i} or", f"{i} none"]} for i in range(num_grammars // 2)]
    guides = [grammars.begin(canonical(asked[i % num_grammars]), []) for i in range(24)]
    for guide in guides[::2]:
        guide.push(allowed(grammars, guide)[-1])
    bits = np.full((len(guides), -(-grammars.vocab_size // 32)), 7, dtype=np.int32)
    grammars.fill(guides, bits)
    for guide, row in zip(guides, bits, strict=True):
        assert list(np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0]) == allowed(grammars, guide)
    assert any(guide.forced is not None for guide in guides)
    assert any(guide.forced is None for guide in guides)


def test_a_token_that_does_not_fit_is_an_error_of_its_guide_alone(grammars: Grammars) -> None:
    text = canonical({"regex": "[a-c]+"})
    good, bad = grammars.begin(text, []), grammars.begin(text, [])
    bad.push(grammars.tokenizer.token_id("z") or 0)
    assert bad.error
    assert not bad.is_active
    assert not good.error
    assert allowed(grammars, good) == allowed(grammars, grammars.begin(text, []))


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that texts of the small vocabulary meet, too."""
    monkeypatch.setattr(grammar, "_LIMITS", {**grammar._LIMITS, "max_lexer_states": 1500})


def test_a_guide_meets_the_limits_of_its_own_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a compiled grammar share the states of its lexer, and those may have run out."""
    monkeypatch.setattr(grammar, "_LIMITS", {**grammar._LIMITS, "max_lexer_states": 300})
    text = canonical({"regex": "[x-z](?:a|b|ab){5000}"})
    shared = sample_grammars()
    together = [write(shared, text, Random(seed), most=60, free=60) for seed in range(8)]
    assert any(guide._is_shared is False for _, guide in together)
    assert not all(guide._is_shared is False for _, guide in together)
    later = shared.begin(text, [])
    assert allowed(shared, later)
    assert later._is_shared
    for seed, (written, guide) in enumerate(together):
        tokens, alone = write(sample_grammars(), text, Random(seed), most=60, free=60)
        assert (written, guide.error) == (tokens, alone.error)


def test_a_row_is_refused_when_it_is_read_if_its_first_mask_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_LIMITS", {**grammar._LIMITS, "max_lexer_states": 20})
    with pytest.raises(GrammarError, match="too many states"):
        sample_grammars().check(canonical({"regex": "begin: (?:a|b|ab|[a-f]c){5000}"}))


def test_rows_are_checked_while_others_run(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_MAX_COMPILED", 3)
    fresh = Grammars(grammars.tokenizer, grammars.vocab_size, grammars.eos_token_ids)
    texts = [canonical({"choice": [f"row {i}", f"line {i}"]}) for i in range(8)]

    def check(turn: int) -> None:
        for i in range(60):
            fresh.check(texts[(i * turn) % 8])

    def run(turn: int) -> list[bool]:
        return [write(fresh, texts[(i + turn) % 8], Random(i))[1].is_complete for i in range(60)]

    with ThreadPoolExecutor(4) as pool:
        checks = [pool.submit(check, turn) for turn in (1, 3)]
        runs = [pool.submit(run, turn) for turn in (0, 4)]
        assert [job.result() for job in checks] == [None, None]
        assert all(all(job.result()) for job in runs)
    assert len(fresh._compiled) == 3


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_end_their_rows(grammars: Grammars, few_states: None, name: str) -> None:
    """And always at the same place, since limits are no clocks."""
    outcomes = []
    for _ in range(2):
        fresh = Grammars(grammars.tokenizer, grammars.vocab_size, grammars.eos_token_ids)
        fresh._vocabulary = grammars.vocabulary
        try:
            text = canonical(HOSTILE[name])
            fresh.check(text)
        except (ValueError, GrammarError) as error:
            assert name in REFUSED, error
            assert 0 < len(str(error)) < 400
            assert "\n" not in str(error)
            outcomes.append(str(error))
        else:
            assert name not in REFUSED
            written = [write(fresh, text, Random(seed), most=120, free=60) for seed in range(2)]
            outcomes.append(str([(tokens, guide.error, guide.is_complete) for tokens, guide in written]))
            assert any(guide.error for _, guide in written) == (name in FAILING)
    assert outcomes[0] == outcomes[1]


def test_nothing_is_fetched(grammars: Grammars) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(0.2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/a"
        for schema in ({"$ref": address}, {"$schema": address, "type": "null"}, {"$id": address, "$ref": "b"}):
            with pytest.raises(GrammarError, match="does not fetch"):
                grammars.check(canonical({"json": schema}))
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    "asked",
    [{"regex": "(?s:.)*"}, {"json": {}}, {"json": {"type": "string"}}, {"choice": ["<|im_end|>a", "<|im_start|>"]}],
)
def test_special_tokens_never_come_and_end_tokens_only_at_the_end(asked: dict[str, Any]) -> None:
    padded = sample_grammars(vocab_size=Tokenizer.load(SAMPLE).vocab_size + 61)
    special, ends = padded.tokenizer.silent_token_ids, set(padded.eos_token_ids)
    for seed in range(4):
        tokens, _ = write(padded, canonical(asked), Random(seed), most=60)
        guide = padded.begin(canonical(asked), [])
        for token in tokens:
            found = allowed(padded, guide)
            assert max(found) < padded.tokenizer.vocab_size
            assert special.intersection(found) == (ends if guide.is_complete else set())
            guide.push(token)


def test_a_model_without_end_tokens_ends_where_nothing_may_follow() -> None:
    tokenizer = Tokenizer.load(SAMPLE)
    endless = Grammars(tokenizer, tokenizer.vocab_size, [])
    assert set(complete_texts(endless, {"choice": ["yes", "no"]}, range(20))) == {"yes", "no"}
    guide = endless.begin(canonical({"regex": "a[bc]*"}), [])
    for _ in range(5):
        found = allowed(endless, guide)
        assert tokenizer.silent_token_ids.isdisjoint(found)
        guide.push(found[-1])


def test_end_tokens_beyond_the_vocabulary_are_no_matter() -> None:
    tokenizer = Tokenizer.load(SAMPLE)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [7, 5000])
    assert complete_texts(grammars, {"choice": ["yes", "no"]})


def piece_tokenizer(model: Any, decoder: Any, normalizer: Any = None) -> Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    if decoder is not None:
        backend.decoder = decoder
    backend.pre_tokenizer = pre_tokenizers.Whitespace() if normalizer is None else None
    if normalizer is not None:
        backend.normalizer = normalizer
    return Tokenizer(backend)


def test_bytes_of_sentencepiece_stand_for_themselves() -> None:
    vocab = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *LETTERS, "\u2581", "\u2581hello"]
    model = models.BPE({token: i for i, token in enumerate(vocab)}, [], byte_fallback=True, unk_token="<unk>")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer = piece_tokenizer(model, decoders.Sequence(parts), normalizer)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.vocab_size - 1])
    choice = ["hello", "say hello", "é, ü"]
    assert set(complete_texts(grammars, {"choice": choice}, range(40))) == set(choice)


@pytest.mark.parametrize("kind", ["word pieces", "words"])
def test_a_tokenizer_whose_tokens_stand_for_no_bytes_is_refused(kind: str) -> None:
    if kind == "words":
        tokenizer = piece_tokenizer(models.WordLevel({"[UNK]": 0, "yes": 1}, unk_token="[UNK]"), None)
    else:
        vocab = {token: i for i, token in enumerate(["[UNK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)])}
        tokenizer = piece_tokenizer(models.WordPiece(vocab, unk_token="[UNK]"), decoders.WordPiece())
    with pytest.raises(GrammarError, match="this tokenizer cannot be used with a grammar"):
        Grammars(tokenizer, tokenizer.vocab_size, []).check(canonical({"choice": ["yes"]}))


def test_many_grammars_fill_their_masks_where_the_system_tells_no_affinity(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS; several grammars share the work of threads, whose number it is asked for."""
    monkeypatch.delattr(os, "sched_getaffinity")
    texts = [canonical({"choice": [letter, "z"]}) for letter in LETTERS[: grammar._MIN_PARALLEL + 2]]
    mine = Grammars(grammars.tokenizer, grammars.vocab_size, grammars.eos_token_ids)
    guides = [mine.begin(text, []) for text in texts]
    bits = np.zeros((len(guides), -(-grammars.vocab_size // 32)), np.int32)
    mine.fill(guides, bits)
    assert mine._executor is not None
    assert [bool(row.any()) for row in bits] == [True] * len(texts)
