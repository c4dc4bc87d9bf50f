"""Bound on how much the parts of a tokenizer can lengthen a text, computed from their settings.

A ``tokenizer.json`` is data from a stranger, and some of its parts insert text of their own: a normalizer that writes
100 kB per letter, or twenty in a row that double it, would exhaust the machine's memory at a row of a few hundred
letters, and again at each resume. The Rust library bounds nothing, so such a file is refused when it is loaded. Time is
not bounded here.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import tokenizers

MAX_GROWTH = 256  # characters per character; LFM2's tokenizer makes 4 at most, normal forms of Unicode make 18
MAX_TOKEN_CHARS = 10_000  # of one entry of the vocabulary
_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")


def check_expansion(backend: tokenizers.Tokenizer) -> None:
    """Check all parts of a tokenizer. Raises ValueError naming one that can make too much of a text."""
    for names in (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",)):
        parts = [getattr(backend, name) for name in names]
        growth = math.prod(_growth(json.loads(part.__getstate__())) for part in parts if part is not None)
        if growth > MAX_GROWTH:
            what = " and ".join(names)
            raise ValueError(f"its {what} can make a text more than {MAX_GROWTH} times as long; use another tokenizer")
    longest = max(map(len, backend.get_vocab()), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise ValueError(f"a token of its vocabulary has {longest:,} characters; at most {MAX_TOKEN_CHARS:,} are taken")


def _growth(part: dict[str, Any]) -> int:
    """The most characters, or tokens of a template, that a part makes of one."""
    kind = part["type"]
    if kind == "Sequence":
        return math.prod(_growth(inner) for name in _LISTS for inner in part.get(name, ()))
    if kind == "Replace":
        pattern = part["pattern"].get("String", "")  # an expression can match between any two characters
        return max(1, -(-len(part["content"]) // len(pattern))) if pattern else 1 + len(part["content"])
    if kind == "Prepend":
        return 1 + len(part["prepend"])
    if kind == "Precompiled":
        charsmap = base64.b64decode(part["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")  # after a trie and its size
        return max([1, *map(len, texts)])
    if kind == "TemplateProcessing":
        added = {name: len(token["ids"]) for name, token in part["special_tokens"].items()}
        return sum(added.get(piece.get("SpecialToken", {}).get("id"), 1) for piece in part["single"])
    return {"ByteLevel": 4, "BertNormalizer": 3, "Metaspace": 2}.get(kind, 1)
