"""Parsers and formatters of values with a unit, for job files and flags: sizes, durations, percentages, times, shards.

Every parser raises ``ValueError`` whose text completes the sentence "<key> = <value>: ...".
"""

from __future__ import annotations

import re
import reprlib
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_STEERING = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of ``4GiB``, ``512MB``, ``2G`` or ``1048576``: MB is 1000-based, MiB and a bare M are 1024-based."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError('must be a size such as "4GiB" or "512MB"')
    number, prefix, binary, byte = match.groups()
    base = 1000 if byte and not binary else 1024
    size = float(number) * base ** _POWER[prefix.lower()]
    if size >= 2**63:
        raise ValueError("must be a size below 8 EiB")
    return int(size)


def parse_duration(text: str) -> float:
    """Seconds of ``55m``, ``1h30m``, ``90s``, ``2d`` or a bare number of seconds."""
    compact = text.replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", compact):
        return float(compact)
    match = _DURATION.fullmatch(compact)
    if match is None or not any(match.groups()):
        raise ValueError('must be a duration such as "55m", "1h30m" or "90s"')
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


def format_amount(amount: float) -> str:
    """An amount of money, in any currency."""
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.4f}"


def parse_share(text: str) -> float:
    """The share, from 0 to 1, that ``5%`` or ``0.05`` means."""
    message = 'must be a share such as "5%" or 0.05'
    body, percent, rest = text.strip().partition("%")
    try:
        share = float(body) / (100 if percent else 1)
    except ValueError:
        raise ValueError(message) from None
    if rest or not 0 <= share <= 1:
        raise ValueError(message)
    return share


def parse_clock(text: str, now: datetime) -> datetime:
    """The instant of an ISO date and time, or the next ``05:55`` or ``05:55:30`` after ``now``.

    ``now`` has a time zone; times without one are local. Raises ValueError for other text.
    """
    for form in ("%H:%M", "%H:%M:%S"):
        try:
            clock = datetime.strptime(text.strip(), form).time()
        except ValueError:
            continue
        at = datetime.combine(now.date(), clock)
        if at.astimezone() <= now:
            at += timedelta(days=1)  # before the zone is attached, so that 05:55 stays 05:55 over a clock change
        return at.astimezone()
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise ValueError('must be a clock time such as "05:55" or a date and time such as "2026-01-31T05:55"') from None


def parse_count(text: str) -> int:
    """A whole number of at least 1."""
    if re.fullmatch(r"\s*0*[1-9]\d{0,17}\s*", text) is None:
        raise ValueError("must be a whole number of at least 1 and at most 18 digits")
    return int(text)


def counted(number: int, noun: str) -> str:
    """``1 row``, ``2,000 rows``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_share(share: float, digits: int) -> str:
    """A share in percent; only exactly 0 and 1 are shown as 0% and 100%, however close others are."""
    smallest = 0.01 / 10**digits
    return f"{min(max(share, smallest), 1 - smallest) if 0 < share < 1 else share:.{digits}%}"


def printable(text: str) -> str:
    """One line of text that is safe for a terminal.

    Control characters (C0, C1, DEL; newlines and tabs too), marks that change the direction of writing, line and
    paragraph separators, and lone surrogates are shown as escapes.
    """
    return _STEERING.sub(lambda match: ascii(match[0])[1:-1], text)


def shortened(text: str, width: int) -> str:
    """``text``, cut to ``width`` characters with an ellipsis if it is longer."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def labelled(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Labels and texts as lines of 80 columns, wrapped below the text; an empty label continues the previous one."""
    for label, text in lines:
        for number, part in enumerate(textwrap.wrap(printable(text), 67) or [""]):
            yield f"{'' if number else label:<12} {part}".rstrip()


def one_line(error: BaseException) -> str:
    """The message of an error as one line of at most 300 characters; its type if the message is empty."""
    return shortened(" ".join(str(error).split()) or type(error).__name__, 300)


def shown(value: object, width: int = 100) -> str:
    """The ``repr`` of a value of unknown size, for an error message, in at most ``width`` characters."""
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = width
    short.maxlevel = 3
    try:
        text = short.repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"(a huge {type(value).__name__})"
    return text if len(text) <= width else f"{text[: width - 3]}..."


def format_duration(seconds: float) -> str:
    """A duration as people read it: ``4.2 s``, ``3m 05s``, ``2h 07m``, ``3d 04h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {secs:02d}s"


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard ``number`` of ``count``, counted from 1: the rows with ``index % count == number - 1``.

    Raises ValueError for a number outside 1 to ``count``; its text completes "<flag> = <value>: ...".
    """

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError('must be "i/n" with 1 <= i <= n, such as "2/8"')

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """``2/8``: the second of eight shards. Raises ValueError for any other text."""
        match = re.fullmatch(r"\s*(\d{1,18})\s*/\s*(\d{1,18})\s*", text)
        return cls(int(match[1]), int(match[2])) if match else cls(0, 0)

    def rows(self, num_rows: int = sys.maxsize) -> range:
        """The indexes of this shard's rows among the first ``num_rows`` rows of the input."""
        return range(self.number - 1, num_rows, self.count)


WHOLE = Shard()  # the only shard of a job that is not divided
