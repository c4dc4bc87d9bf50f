"""The tokenizer in a GGUF file gives the ids that transformers gets from the same file, or is refused by name."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from chat_templates import THINKING
from gguf_files import write_gguf
from run_helpers import smollm2
from scripts import texts
from tiny_model import write_checkpoint
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from batchgen.core.errors import ModelError
from batchgen.model.registry import read_config
from batchgen.text.gguf_tokenizer import read_gguf_tokenizer

CONTROL, USER_DEFINED = 3, 4
ADDED = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED}


@cache
def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small vocabulary, of all bytes and what the texts repeat."""
    backend = Backend(models.BPE())
    split = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    vocabulary = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [" ".join(merge) for merge in merges]


def metadata(pre: str | None, **changes: Any) -> dict[str, Any]:
    plain, merges = trained()
    tokens = [*plain, *ADDED]
    found = {
        "pre": pre,
        "tokens": tokens,
        "token_type": [*[1] * len(plain), *ADDED.values()],
        "merges": merges,
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (found | changes).items()}


def write(
    folder: Path, pre: str | None = "smollm", template: Any = None, for_tools: Any = None, **changes: Any
) -> Path:
    values = metadata(pre, **changes) | {"tokenizer.chat_template": template}
    values |= {"tokenizer.chat_template.tool_use": for_tools}
    num_tokens = len(metadata(pre)["tokenizer.ggml.tokens"])
    tensors = write_checkpoint(folder / "plain", model_type="qwen3", vocab_size=num_tokens)
    config = read_config(folder / "plain")
    write_gguf(folder / "tiny.gguf", config, tensors, lambda name: gguf.GGMLQuantizationType.F32, values)
    return folder / "tiny.gguf"


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "lfm2"])
@pytest.mark.parametrize("has_bos", [False, True])
def test_ids_are_those_of_transformers_from_the_same_file(tmp_path: Path, pre: str, has_bos: bool) -> None:
    from transformers import AutoTokenizer

    path = write(tmp_path, pre, add_bos_token=has_bos)
    ours, theirs = read_gguf_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    if pre == "smollm":  # which it does not know, and reads as GPT-2's; this is that of SmolLM2's tokenizer.json
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    if pre == "qwen2":  # likewise
        theirs.backend_tokenizer.normalizer = normalizers.NFC()
    for special in (False, True):
        expected = [theirs(text, add_special_tokens=special).input_ids for text in texts()]
        assert ours.encode_batch(texts(), special) == expected
        if special and has_bos:
            assert {ids[0] for ids in expected} == {ours.token_id("<|im_start|>")}
    ids = ours.encode_batch(["Straße <think>42</think><|im_end|>"], False)[0]
    assert not isinstance(ids, Exception)
    assert ours.decode(ids) == "Straße <think>42</think>"
    assert ours.silent_token_ids == {ours.token_id(token) for token, kind in ADDED.items() if kind == CONTROL}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["AbcDEF", "1234", "\u0120\u00c3\u00a4", "'s", "!/", "\u010a"]),
        ("refact", ["AbcDEF", "1", "2", "3", "4", "\u0120\u00c3\u00a4", "'s", "!/", "\u010a"]),
        ("deepseek-r1-qwen", ["AbcDEF", "1", "2", "3", "4", "\u0120\u00c3\u00a4", "'s", "!/\u010a"]),
        ("tekken", ["Abc", "DEF", "1", "2", "3", "4", "\u0120\u00c3\u00a4", "'s", "!/\u010a"]),
        ("default", ["AbcDEF", "123", "4", "\u0120\u00c3\u00a4", "'", "s", "!/", "\u010a"]),
    ],
)
def test_a_text_is_split_as_the_pre_tokenizer_of_that_name_does(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    split = Backend.from_str(read_gguf_tokenizer(write(tmp_path, pre)).to_json()).pre_tokenizer
    assert split is not None
    assert [piece for piece, _ in split.pre_tokenize_str("AbcDEF1234 \u00e4's!/\n")] == pieces


@pytest.mark.slow
def test_ids_of_a_real_file_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    path = smollm2()
    ours, theirs = read_gguf_tokenizer(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)  # see above
    assert ours.encode_batch(texts(), False) == [theirs(text, add_special_tokens=False).input_ids for text in texts()]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["whole"]), ("smollm", ["w", "h", "o", "l", "e"])])
def test_a_word_of_the_vocabulary_is_its_token_where_llama_has_it_so(
    tmp_path: Path, pre: str, expected: list[str]
) -> None:
    tokens = [*metadata(pre)["tokenizer.ggml.tokens"], "whole"]
    ours = read_gguf_tokenizer(write(tmp_path, pre, tokens=tokens, merges=["t h"], token_type=None))
    assert ours.encode_batch(["whole"], False)[0] == [tokens.index(token) for token in expected]


@pytest.mark.parametrize(
    ("pre", "is_added"), [("llama-bpe", True), ("lfm2", True), ("smollm", False), ("qwen2", False)]
)
def test_a_file_that_says_nothing_of_bos_gets_that_of_its_kind(tmp_path: Path, pre: str, is_added: bool) -> None:
    ours = read_gguf_tokenizer(write(tmp_path, pre, add_bos_token=None))
    plain, special = (ours.encode_batch(["Hi"], special)[0] for special in (False, True))
    assert special == ([ours.token_id("<|im_start|>")] if is_added else []) + plain  # type: ignore[operator]


@pytest.mark.parametrize("has_bos", [False, True])
def test_a_file_may_ask_for_an_end_token_after_each_text(tmp_path: Path, has_bos: bool) -> None:
    ours = read_gguf_tokenizer(write(tmp_path, add_bos_token=has_bos, add_eos_token=True))
    plain, special = (ours.encode_batch(["Hi"], special)[0] for special in (False, True))
    bos, eos = ours.token_id("<|im_start|>"), ours.token_id("<|im_end|>")
    assert special == ([bos] if has_bos else []) + plain + [eos]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("added", "changes", "ends"),
    [
        (["<|eot_id|>"], {}, ["<|eot_id|>"]),
        (["<|end_of_text|>", "</s>"], {}, ["<|end_of_text|>", "</s>"]),
        (["<|end|>"], {}, ["<|end|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], {}, ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|calls|>", "<|flush|>"], {}, ["<|calls|>", "<|flush|>"]),
        (["</s>", "<|tool_response>"], {}, ["<|tool_response>"]),
        (["<|file_sep|>", "<|repo_name|>"], {}, ["<|file_sep|>", "<|repo_name|>"]),
        (["<PAD>", "<stop>"], {"fim_pad_token_id": "<stop>"}, ["<stop>"]),
        (["<turn>", "<message>"], {"eot_token_id": "<turn>", "eom_token_id": "<message>"}, ["<turn>", "<message>"]),
    ],
    ids=str,
)
def test_the_end_tokens_are_those_of_llama_cpp(
    tmp_path: Path, added: list[str], changes: dict[str, str], ends: list[str]
) -> None:
    tokens = [*metadata("smollm")["tokenizer.ggml.tokens"], *added]
    ids = {key: tokens.index(token) for key, token in changes.items()}
    ours = read_gguf_tokenizer(write(tmp_path, tokens=tokens, eos_token_id=0, **ids))
    found = {tokens[token_id] for token_id in ours.eos_token_ids}
    assert found == {"<|endoftext|>", "<|im_end|>", tokens[0], *ends}


def test_a_token_that_ends_answers_is_special_whatever_its_type(tmp_path: Path) -> None:
    types = [1] * len(metadata("smollm")["tokenizer.ggml.tokens"])
    ours = read_gguf_tokenizer(write(tmp_path, token_type=types))
    end = ours.token_id("<|im_end|>")
    assert end in ours.silent_token_ids and ours.token_id("<think>") not in ours.silent_token_ids
    assert ours.encode_batch(["<|im_end|>"], False) == [[end]]


def test_a_token_that_ends_no_answer_is_not_special(tmp_path: Path) -> None:
    added = ["<|end|>", "<|return|>", "<|call|>", "</s>", "<|tool_response>"]
    tokens = [*metadata("smollm")["tokenizer.ggml.tokens"], *added]
    ours = read_gguf_tokenizer(write(tmp_path, tokens=tokens))
    silent = {tokens[token_id] for token_id in ours.silent_token_ids}
    assert silent.intersection(added) == {"<|return|>", "<|call|>", "<|tool_response>"}
    assert ours.encode_batch(["<|end|>"], False) == [[ours.token_id("<|end|>")]]
    assert ours.encode_batch(["</s>"], False) != [[ours.token_id("</s>")]]


def test_the_chat_template_of_the_file_is_rendered_with_its_special_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write(tmp_path, template="{{ bos_token }}|{{ eos_token }}|" + THINKING)
    chat = [{"role": "user", "content": "Hi"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert list(read_gguf_tokenizer(path).render_chats([chat])) == [expected]
    assert expected.startswith("<|im_start|>|<|im_end|>|")


def test_a_template_for_tools_is_taken_for_chats_with_tools(tmp_path: Path) -> None:
    text, chat = "{{ messages[0].content }}", [{"role": "user", "content": "Hi"}]
    for_tools = text + "{% for tool in tools %} {{ tool.function.name }}{% endfor %}"
    ours = read_gguf_tokenizer(write(tmp_path, template=text, for_tools=for_tools))
    tools = [{"type": "function", "function": {"name": "find"}}]
    assert list(ours.render_chats([{"messages": chat}, {"messages": chat, "tools": tools}])) == ["Hi", "Hi find"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'; tokenizers of 'gpt2' are read: give --tokenizer"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"pre": "falcon"}, "tokenizer.ggml.pre is 'falcon'; pre-tokenizers 'smollm', 'refact', 'gpt-2', 'qwen2', "),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"add_sep_token": True}, "tokenizer.ggml.add_sep_token is true, which is not computed here: give --tokenizer"),
        ({"tokens": None}, "tokens, merges or token types of tokenizer.ggml are missing or no lists"),
        ({"tokens": [1, 2]}, "are missing or no lists"),
        ({"merges": "a b"}, "are missing or no lists"),
        ({"token_type": ["x"]}, "are missing or no lists"),
        ({"tokens": ["a", "a"]}, "token 'a' is there twice"),
        ({"merges": ["ab"]}, "merge 'ab' is not of two tokens"),
        ({"merges": ["zz yy"]}, "has no usable tokenizer"),
        ({"template": 5}, "tokenizer.chat_template is not a text"),
        ({"template": "{% if %}"}, "the chat template does not compile"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_tokenizer_that_is_not_read_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(ModelError) as caught:
        read_gguf_tokenizer(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_ids_of_special_tokens_beyond_the_vocabulary_are_none(tmp_path: Path) -> None:
    ours = read_gguf_tokenizer(write(tmp_path, bos_token_id=2**31, add_bos_token=True))
    assert ours.encode_batch(["Hi"], True) == ours.encode_batch(["Hi"], False)
