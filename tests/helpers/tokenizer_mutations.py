"""Model folders whose tokenizer files are damaged at random: each is refused in one line, or encodes and decodes.

``python tokenizer_mutations.py FIRST COUNT FOLDER`` tries ``COUNT`` seeds within 2 GiB of memory, and prints a line
for each that ends in any other way, or that the process did not survive.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchgen.core.errors import ModelError, TokenizerError
from batchgen.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "sample_data" / "tiny-lfm2"
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
TEXTS = ("", "hello world", "a<|im_end|>b\n", "naïve 東京 🙂", "  1234567  ", "a" * 5000)
MAX_BYTES = 2 << 30


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**32 - 1, 2**64, 10**30, 1e308, float("nan"),
    "", "a", "\x00", "\ud800", "x" * 100_000, [], [[]], [None], ["a", "b"], _nested(200),
    {}, {"a": 1}, {"type": "BPE"}, {"content": 5}, {"content": "<|im_end|>"},
)  # fmt: skip
PARTS: tuple[tuple[str, Any], ...] = (
    ("decoder", {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40}),
    ("decoder", {"type": "Replace", "pattern": {"Regex": "("}, "content": "a"}),
    ("decoder", {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}),
    ("decoder", {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}),
    ("decoder", {"type": "WordPiece", "prefix": "", "cleanup": True}),
    ("decoder", {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"String": ""}, "behavior": "Removed", "invert": True}),
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    ("pre_tokenizer", {"type": "Digits", "individual_digits": True}),
    ("normalizer", {"type": "Prepend", "prepend": "x" * 1000}),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": ""}, "content": "yy"}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
    ("post_processor", {"type": "RobertaProcessing", "sep": ["a", 10**9], "cls": ["b", 5]}),
    ("post_processor", {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
    ("truncation", {"direction": "Left", "max_length": 0, "strategy": "LongestFirst", "stride": 5}),
    ("padding", {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "p"}),
    ("model", {"type": "WordLevel", "vocab": {"hello": 0}, "unk_token": "?"}),
    ("model", {"type": "WordPiece", "vocab": {}, "unk_token": "?", "max_input_chars_per_word": 0}),
    ("model", {"type": "Unigram", "vocab": [], "unk_id": None}),
    ("model", {"type": "Unigram", "vocab": [["a", -1e308], ["", 0.0]], "unk_id": 0, "byte_fallback": True}),
    ("model", {"type": "BPE", "vocab": {}, "merges": []}),
)
_NO_TEMPLATES: tuple[Any, ...] = (None, 5, True, {}, {"default": "x"}, [], [5], [{"name": "default"}])
_EOS: tuple[Any, ...] = (None, 5, [], {}, {"content": None}, {"content": "nowhere"}, "", "\x00" * 999)
CONFIGS: tuple[tuple[str, Any], ...] = (
    *(("chat_template", value) for value in _NO_TEMPLATES),
    *(("chat_template", [{"name": "default", "template": value}]) for value in (None, 5, "{{ messages }}", "{% if %}")),
    *(("eos_token", value) for value in _EOS),
)


def _other_value(holder: Any, rng: random.Random) -> None:
    """Somewhere below ``holder``, drop, double, rename or replace a value."""
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.7:
        _other_value(holder[key], rng)
        return
    act = rng.randrange(4)
    if act == 0:
        del holder[key]
    elif act == 1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    elif act == 1:
        holder.append(copy.deepcopy(holder[key]))
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))


def _vocabulary(settings: Any, rng: random.Random) -> None:
    vocab = settings["model"]["vocab"]
    names = rng.sample(sorted(vocab), 2)
    vocab[names[0]] = rng.choice((vocab[names[1]], 2**32 - 1, 2**31, 10**9, len(vocab) + 5))
    if rng.random() < 0.5:
        del vocab[names[1]]


def _merges(settings: Any, rng: random.Random) -> None:
    merges = settings["model"]["merges"]
    at = rng.randrange(len(merges))
    merges[at] = rng.choice(
        (["zz", "qq"], ["a"], "a b c", "", 5, None, ["", ""], merges[0], list(reversed(merges[at])))
    )


def _bytes(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return rng.choice(
        (
            content[:at],
            content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
            content[:at] + content[at:] * 2,
            content.replace(b":", b":" + b"[" * 5000, 1),
            content.replace(b": ", b": " + b"9" * 5000, 1),
            b"\xef\xbb\xbf" + content,
            b"",
            b"null",
            b"[" * 100_000,
        )
    )


def mutate(folder: Path, rng: random.Random) -> str:
    """Damage a copy of the model folder in one way; what was done."""
    name = rng.choice(FILES[:2] if rng.random() < 0.8 else FILES)
    path = folder / name
    if not path.exists():
        path.write_text('{"eos_token": "<|im_end|>", "bos_token": {"content": "<|startoftext|>"}}')
    settings = json.loads(path.read_text(encoding="utf-8"))
    acts: list[Callable[[Any, random.Random], None]] = [_other_value, _other_value, _other_value]
    acts += [_vocabulary, _merges] if name == FILES[0] else []
    known = {FILES[0]: PARTS, FILES[1]: CONFIGS}.get(name, ())
    kind = rng.randrange(4)
    if kind == 0:
        path.write_bytes(_bytes(path.read_bytes(), rng))
        return f"{name}: other bytes"
    if kind == 1 and known:
        key, value = rng.choice(known)
        settings[key] = value
        done = f"{name}: {key} = {json.dumps(value)[:80]}"
    else:
        act = rng.choice(acts)
        act(settings, rng)
        done = f"{name}: {act.__name__}"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return done


def use(folder: Path) -> None:
    """Load, encode and decode. Raises whatever a row would not survive."""
    tokenizer = Tokenizer.load(folder)
    for add_special_tokens in (False, True):
        for answer in tokenizer.encode_batch(TEXTS, add_special_tokens):
            if not isinstance(answer, TokenizerError):
                _decode(tokenizer, answer)
    _decode(tokenizer, [0, 1, 2])
    _decode(tokenizer, [min(tokenizer.vocab_size, 2**32) - 1] if tokenizer.vocab_size else [])
    if tokenizer.chat_template:
        list(tokenizer.render_chats([[{"role": "user", "content": "hi"}]]))


def _decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    try:
        tokenizer.decode(ids)
    except TokenizerError as error:
        assert "\n" not in str(error)


def main(first: int, count: int, parent: Path) -> None:
    """Try the seeds; prints those that fail."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    for seed in range(first, first + count):
        folder = parent / str(seed)
        folder.mkdir()
        for name in FILES[:3]:
            shutil.copy(MODEL / name, folder)
        if seed % 4:  # each template is a process to start
            settings = json.loads((folder / FILES[1]).read_text(encoding="utf-8"))
            (folder / FILES[1]).write_text(json.dumps(settings | {"chat_template": None}), encoding="utf-8")
        done = mutate(folder, random.Random(seed))
        print(seed, done, end=" ", flush=True)
        try:
            use(folder)
            print("ok")
        except ModelError as error:
            print("refused" if "\n" not in str(error) else f"BAD: two lines: {error!r}")
        except BaseException as error:
            print(f"BAD: {error!r} {traceback.format_exc()!r}")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
