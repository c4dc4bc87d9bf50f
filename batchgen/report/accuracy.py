"""Accuracy of a run: right answers among the rows that have an expected one, with wrong ones, samples and labels.

Rows are added one by one; memory does not grow with them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import itemgetter
from typing import Any

from batchgen.core.answers import find_answer, is_right, normal, text_of
from batchgen.core.units import shortened

Finder = Callable[[Mapping[str, Any]], Any]  # of the right answer in an output record
SHOWN_LABELS = 12  # in the table of expected and found labels; with more, only frequent mistakes are shown
_MAX_LABELS = 1000  # with more, answers are not labels: each row has its own
_NUM_WRONG = 5
_SHOWN_CHARS = 200  # of a wrong answer, and of a label
_Z = 1.959964  # of 95%
_MASK = (1 << 64) - 1


@dataclass
class Accuracy:
    """Counts of rows whose answer was compared with the right answer, which ``expected`` finds in their record.

    ``answer`` is the rule by which the answer was found; without it whole texts are compared. ``has_labels`` says that
    all answers are from a closed set; scored labels and labels of classifiers always are.
    """

    expected: Finder
    answer: str | None = None
    has_labels: bool = False
    correct: int = 0
    total: int = 0
    without_answer: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)  # the wrong rows of smallest index
    max_samples: int = 1
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("mean", "majority", "best"), 0.0))
    pairs: Counter[tuple[str, str]] | None = field(default_factory=Counter)  # label expected, found; None: no labels
    digest: int = 0  # of ids and expected answers, in any order of the rows

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in an output record; it is compared if it has an expected value."""
        expected = self.expected(record)
        if expected is None:
            return
        answer, right = self._verdict(record, expected)
        self.total += 1
        self.correct += right
        self.digest = (self.digest + _digest(record["id"], expected)) & _MASK
        self.without_answer += answer is None
        self._add_samples(record, expected, right=right)
        if self.has_labels or "finish_reason" not in record:
            self._add_label(text_of(expected).strip(), answer, right=right)
        if not right:
            self._add_wrong(record, answer, expected)

    def _verdict(self, sample: Mapping[str, Any], expected: Any) -> tuple[str | None, bool]:
        """The answer of a record, or of one of its samples, and whether it is right."""
        if self.answer:
            answer = sample.get("extracted")
            return answer, is_right(self.answer, answer, expected)
        text = sample.get("text" if "finish_reason" in sample else "label") or ""
        return text, text.strip() == text_of(expected).strip()

    def _add_samples(self, record: Mapping[str, Any], expected: Any, *, right: bool) -> None:
        """Count how good a row's samples are: each by itself, the answer that most agree on, and the best of them."""
        verdicts = [self._verdict(sample, expected) for sample in record.get("samples") or ()] or [("", right)]
        self.max_samples = max(self.max_samples, len(verdicts))
        ballots = [normal(text) if self.answer else text.strip() for text, _ in verdicts if text is not None]
        ((winner, _),) = Counter(ballots).most_common(1) or ((None, 0),)
        rights = [is_one for text, is_one in verdicts if text is not None]
        self.sums["mean"] += sum(rights) / len(verdicts)
        self.sums["majority"] += winner is not None and rights[ballots.index(winner)]
        self.sums["best"] += any(rights)

    def _add_label(self, expected: str, answer: str | None, *, right: bool) -> None:
        if self.pairs is None:
            return
        named = expected if right else "" if answer is None else answer.strip()
        self.pairs[shortened(expected, _SHOWN_CHARS), shortened(named, _SHOWN_CHARS)] += 1
        if len(self.pairs) > _MAX_LABELS:
            self.pairs = None

    def _add_wrong(self, record: Mapping[str, Any], answer: str | None, expected: Any) -> None:
        if len(self.wrong) < _NUM_WRONG or record["index"] < self.wrong[-1]["index"]:
            row = {"id": record["id"], "index": record["index"]}
            row["answer"] = None if answer is None else shortened(answer, _SHOWN_CHARS)
            text = text_of(expected)
            part = find_answer(self.answer, text) if self.answer else None  # the compared part of a full solution
            row["expected"] = shortened(text if part is None else part, _SHOWN_CHARS)
            self.wrong = sorted([*self.wrong, row], key=itemgetter("index"))[:_NUM_WRONG]

    def section(self) -> dict[str, Any]:
        """The report's ``accuracy``; see ``build.KEYS``."""
        total = self.total
        section: dict[str, Any] = {"correct": self.correct, "total": total}
        section["exact_match"] = round(self.correct / total, 6) if total else None
        section |= {"interval": interval(self.correct, total) if total else None, "wrong": self.wrong}
        if self.answer:
            section["without_answer"] = self.without_answer
        if self.max_samples > 1:
            section["samples"] = {"n": self.max_samples}
            section["samples"] |= {name: round(count / total, 6) for name, count in self.sums.items()}
        if self.pairs:
            section |= self._labels(self.pairs)
        return section

    def _labels(self, pairs: Mapping[tuple[str, str], int]) -> dict[str, Any]:
        """Figures of each label, the most frequent first, and the most frequent mistakes; both bounded."""
        counts: dict[str, Counter[str]] = {}
        for (expected, answer), count in pairs.items():
            counts.setdefault(expected, Counter())["expected"] += count
            counts.setdefault(answer, Counter())["found"] += count
            counts[expected]["correct"] += count * (expected == answer)
        ordered = sorted(counts.items(), key=lambda item: (-item[1]["expected"], -item[1]["found"], item[0]))
        labels = [
            {
                "label": label,
                **{name: number[name] for name in ("expected", "found", "correct")},
                "precision": round(number["correct"] / number["found"], 6) if number["found"] else None,
                "recall": round(number["correct"] / number["expected"], 6) if number["expected"] else None,
            }
            for label, number in ordered[: 8 * SHOWN_LABELS]
        ]
        mistakes = sorted(
            ((*pair, count) for pair, count in pairs.items() if pair[0] != pair[1]), key=lambda item: (-item[2], *item)
        )
        confusions = [dict(zip(("expected", "found", "rows"), item, strict=True)) for item in mistakes]
        return {"num_labels": len(counts), "labels": labels, "confusions": confusions[: SHOWN_LABELS**2]}


def interval(correct: int, total: int) -> list[float]:
    """The 95% interval of a share (Wilson's score), which also holds for few rows and for shares of 0 and 1."""
    share, spread = correct / total, _Z**2 / total
    half = _Z * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return [round(min(max((share + spread / 2 + side) / (1 + spread), 0.0), 1.0), 6) for side in (-half, half)]


def _digest(row_id: object, expected: object) -> int:
    content = f"{row_id}\0{text_of(expected).strip()}".encode(errors="backslashreplace")
    return int.from_bytes(blake2b(content, digest_size=8).digest())
