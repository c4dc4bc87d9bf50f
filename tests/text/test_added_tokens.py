"""Tokens that tokenizer_config.json alone names are tokens, as in transformers: the same ids, texts and silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from input_helpers import write_tokenizer

from batchgen.core.errors import ModelError
from batchgen.text.tokenizer import Tokenizer, special_tokens

TEXT = "Hi <X> <Y>a<|im_end|> <Z>b"
OLDER = {"map": "special_tokens_map.json", "added": "added_tokens.json"}
NAMES = ("bos_token", "eos_token", "pad_token")


def token(text: str, *, special: bool = True, **marks: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, "special": special, **usual, **marks}


def kept(text: str, **marks: bool) -> dict[str, Any]:
    return token(text, **marks) | {"__type": "AddedToken"}


CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a list": {"extra_special_tokens": ["<X>", "<Y>"]},
    "names": {"extra_special_tokens": {"x_token": "<X>"}},
    "the older list": {"additional_special_tokens": ["<X>"]},
    "the older list with marks": {"additional_special_tokens": [kept("<X>", lstrip=True)]},
    "both lists": {"extra_special_tokens": ["<X>"], "additional_special_tokens": ["<Y>"]},
    "an empty list": {"extra_special_tokens": [], "additional_special_tokens": ["<Y>"]},
    "a token of the vocabulary": {"extra_special_tokens": ["a"]},
    "by id": {"added_tokens_decoder": {"600": token("<X>")}},
    "by id, not special": {"added_tokens_decoder": {"600": token("<X>", special=False)}},
    "by ids, out of order": {
        "added_tokens_decoder": {"701": token("<Y>"), "700": token("<X>", special=False)},
        "extra_special_tokens": ["<Z>", "<X>"],
    },
    "the end is not special": {"added_tokens_decoder": {"7": token("<|im_end|>", special=False)}},
    "the end with marks": {"added_tokens_decoder": {"7": token("<|im_end|>", lstrip=True, rstrip=True)}},
    "the end with marks elsewhere": {"eos_token": kept("<|im_end|>", lstrip=True, rstrip=True)},
    "a new token for padding": {"pad_token": "<X>"},
    "a new token for padding with marks": {"pad_token": kept("<X>", lstrip=True)},
    "a name of the model's own": {"image_token": "<X>"},
    "special tokens are split": {"split_special_tokens": True},
    "what a tokenizer.json says itself": {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True},
    "the older file": {"map": {"eos_token": "<|pad|>", "pad_token": "<X>", "additional_special_tokens": ["<Y>"]}},
    "the older file beside ids": {"map": {"eos_token": "<|pad|>"}, "added_tokens_decoder": {"600": token("<Z>")}},
    "the oldest file": {"added": {"<Y>": 701, "<X>": 700, "<|im_end|>": 7, "a": 702}, "eos_token": "<Y>"},
    "the oldest file of known ids": {"added": {"<X>": 640, "<|pad|>": 0}, "map": {"pad_token": "<X>"}},
    "the oldest file beside ids": {"added": {"<X>": 700}, "added_tokens_decoder": {"600": token("<Z>")}},
    "the older file with marks": {"map": {"pad_token": {**token("<X>", lstrip=True, rstrip=True)}}},
}


def written(folder: Path, **config: Any) -> Path:
    older = {name: config.pop(key, None) for key, name in OLDER.items()}
    write_tokenizer(folder, **{"tokenizer_class": "PreTrainedTokenizerFast", **config})
    for name, found in older.items():
        if found:
            (folder / name).write_text(json.dumps(found), encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = written(tmp_path, **CASES[case])
    reference, tokenizer = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for adds in (True, False):
        [ids] = tokenizer.encode_batch([TEXT], adds)
        assert ids == reference(TEXT, add_special_tokens=adds)["input_ids"]
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.silent_token_ids == {i for i, found in reference.added_tokens_decoder.items() if found.special}
    assert [special_tokens(folder).get(name) for name in NAMES] == [getattr(reference, name) for name in NAMES]


def test_a_token_for_padding_that_the_model_has_no_row_for_is_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path, pad_token="<X>", extra_special_tokens=["<Y>"])
    size = Tokenizer.load(written(tmp_path / "plain")).vocab_size
    assert Tokenizer.load(folder).vocab_size == size + 2
    assert Tokenizer.load(folder, None, size + 2).vocab_size == size + 2
    few = Tokenizer.load(folder, None, size)
    assert few.token_id("<X>") is None
    assert few.token_id("<Y>") == size, "which a run refuses: it has no row for it"


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": ["<X>"]},
        {"added_tokens_decoder": {"x": token("<X>")}},
        {"added_tokens_decoder": {"600": "<X>"}},
        {"added_tokens_decoder": {"600": {"special": True}}},
        {"added_tokens_decoder": {"9" * 5000: token("<X>")}},
        {"added_tokens_decoder": {"600": token("\ud83d")}},
        {"extra_special_tokens": [7]},
        {"additional_special_tokens": [{"text": "<X>"}]},
        {"pad_token": {"content": "\ud83d"}},
    ],
    ids=lambda config: ascii(config)[:60],
)
def test_what_are_no_tokens_is_refused_by_name(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: {next(iter(config))}"):
        Tokenizer.load(written(tmp_path, **config))


def test_a_list_of_ids_that_are_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"added_tokens.json: must be an object of tokens and their ids"):
        Tokenizer.load(written(tmp_path, added={"<X>": "700"}))


def test_templates_of_which_none_is_the_default_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat_template lists templates, but none is named 'default'"):
        Tokenizer.load(written(tmp_path, chat_template=[{"name": "rag", "template": "x"}]))
