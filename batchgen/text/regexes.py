r"""Regexes as people write them for Python and JSON Schema, in the syntax of Rust that llguidance reads.

``\d``, ``\w`` and ``\s`` match the characters on which all three agree, so that a text also passes later checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# For each class of characters: the members in every dialect, and the members in any dialect.
_SURE = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_ANY = {"d": r"\p{Nd}", "w": r"\p{L}\p{N}\p{M}\p{Pc}\u{200c}\u{200d}", "s": r"\s\x1c-\x1f\u{feff}"}
_MAX_LENGTH = 4096  # characters: what a regex may cost grows with the square of its length
_ESCAPE = r"\\(?:[pPuUx]\{[^}]*\}|.)"
_POSIX = r"\[:\^?\w+:\]"
_PIECE = re.compile(
    rf"(?P<escape>{_ESCAPE})|(?P<set>\[(?P<not>\^?)(?P<body>\]?(?:{_POSIX}|{_ESCAPE}|[^\]\\])*)\])"
    r"|(?P<possessive>(?:[*+?]|\{\d+(?:,\d*)?\})\+)",
    re.DOTALL,
)
_PIECE_OF_SET = re.compile(rf"(?P<posix>{_POSIX})|(?P<escape>{_ESCAPE})|\[|&&|--|~~", re.DOTALL)
_LITERAL = {"[": r"\[", "&&": r"\&\&", "--": r"-\-", "~~": r"\~\~"}  # operators of Rust, plain characters elsewhere
# White space of JSON, in groups, sets and repetitions; digits only as numbers of repetitions.
_WHITE_SPACE = re.compile(r"(?:[ \t\n\r\[\]()|*+?]|\\[tnrs]|\\x(?:20|0[9aAdD])|\(\?:|\{\d+(?:,\d*)?\})+")


def portable(pattern: str) -> str:
    r"""The regex for llguidance: a text that fits it fits ``pattern`` in Python, and in ECMAScript if that supports it.

    ``[[:alpha:]]`` is a POSIX class, as in Rust. Raises ValueError for possessive quantifiers, which mean something
    else in Rust, and for long regexes; llguidance refuses what Rust does not support, such as ``(?=...)``.
    """
    if len(pattern) > _MAX_LENGTH:
        raise ValueError(f"a regex has {len(pattern):,} characters; at most {_MAX_LENGTH:,} are taken")

    def outside(match: re.Match[str]) -> str:
        if match["possessive"]:
            raise ValueError(f"possessive quantifiers such as {match[0]} are not supported; leave out the last +")
        if match["set"]:
            is_negated = bool(match["not"])
            if not is_negated and any(
                f"\\{kind}" in match["body"] and f"\\{kind.upper()}" in match["body"] for kind in _SURE
            ):
                return "(?s:.)"  # such as [\s\S]: any character
            body = _PIECE_OF_SET.sub(lambda piece: _in_set(piece, is_negated), match["body"])
            return f"[{match['not']}{body}]"
        return {r"\A": "^", r"\Z": "$"}.get(match[0]) or _escaped(match[0], is_negated=False)

    return _PIECE.sub(outside, pattern)


def any_of(texts: Iterable[str]) -> str:
    """A regex that fits exactly these texts; of any length."""
    return "|".join("".join(char if char.isalnum() else rf"\u{{{ord(char):x}}}" for char in text) for text in texts)


def white_space(pattern: str) -> str:
    """``whitespace_pattern`` for llguidance. Raises ValueError if it may match more than JSON's white space."""
    if not _WHITE_SPACE.fullmatch(pattern):
        raise ValueError(r"whitespace_pattern may only hold white space, \s, \t, \n, \r, groups, | and repetitions")
    return pattern.replace(r"\s", r"[ \t\n\r]")


def _in_set(piece: re.Match[str], is_negated: bool) -> str:
    if piece["escape"]:
        return _escaped(piece[0], is_negated)
    return _LITERAL.get(piece[0], piece[0])


def _escaped(piece: str, is_negated: bool) -> str:
    """An escape that matches what all three syntaxes agree on or, inside a negated set, what any of them matches."""
    kind = piece[1].lower()
    if piece[1:] not in (kind, kind.upper()) or kind not in _SURE:
        return piece
    if piece[1] == kind:
        return f"[{(_ANY if is_negated else _SURE)[kind]}]"
    return f"[^{(_SURE if is_negated else _ANY)[kind]}]"
