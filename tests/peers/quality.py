"""What a number format costs: each engine's perplexity of the same answers, and how many of its own are the baseline's.

Three steps, as in ``compare.py``, which makes the table of speeds::

    python tests/peers/quality.py texts --model DIR --questions FILE --limit 200 --out texts.jsonl
    python tests/peers/quality.py run --workload texts.jsonl --model DIR --out raw/ transformers/float32=PYTHON \\
        batchgen/w8a8=PYTHON openvino/int8=PYTHON:EXPORTED_DIR
    python tests/peers/quality.py table raw/

The first engine is the baseline. Rows of questions have ``question`` and ``answer``; a question is one user's message.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from math import exp, fsum
from pathlib import Path
from typing import Any

from compare import Peer, conditions, end_tokens

_REPOSITORY = Path(__file__).resolve().parents[2]


def make_texts(given: argparse.Namespace) -> None:
    """Write the token ids of questions, by the model's own chat template, and of their answers."""
    sys.path.insert(0, str(_REPOSITORY))
    from batchgen.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(given.model)
    rows = [json.loads(line) for line in given.questions.read_text().splitlines()[: given.limit]]
    chats = tokenizer.render_chats([[{"role": "user", "content": row["question"]}] for row in rows])
    texts = [*map(str, chats), *(row["answer"] for row in rows)]
    ids = tokenizer.encode_batch(texts, add_special_tokens=False)
    with given.out.open("w") as out:
        for prompt, answer in zip(ids[: len(rows)], ids[len(rows) :], strict=True):
            out.write(json.dumps({"prompt_token_ids": prompt, "answer_token_ids": answer}) + "\n")


def run(given: argparse.Namespace) -> None:
    """Run each engine once."""
    given.out.mkdir(parents=True, exist_ok=True)
    flags = ["--max-tokens", str(given.max_tokens), "--ends", end_tokens(given.model)]
    for number, text in enumerate(given.peers):
        peer = Peer.parse(text, str(given.model))
        found = peer.run("quality_drivers.py", given.workload, flags) | conditions(given.workload)
        path = given.out / f"{number:03}-{peer.name}-{peer.dtype}.json"
        path.write_text(json.dumps(found) + "\n")
        sys.stderr.write(f"{peer.name} {peer.dtype}: {found.get('skipped') or found.get('failed') or 'done'}\n")


def table(runs: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of a table in Markdown, an engine per row, and what they were measured on."""
    yield "| engine | format | perplexity | against the first | equal answers | equal tokens before the first other |"
    yield "|---|---|---|---|---|---|"
    done = [found for found in runs if "answers" in found]
    first = done[0]
    base, num_tokens = fsum(first["logprobs"]), sum(first["num_tokens"])
    for found in done:
        total = fsum(found["logprobs"])
        pairs = list(zip(found["answers"], first["answers"], strict=True))
        equal = sum(a == b for a, b in pairs)
        shared = sum(_num_shared(a, b) for a, b in pairs) / sum(len(b) for _, b in pairs)
        loss = 100 * (exp((base - total) / num_tokens) - 1)
        perplexity = exp(-total / num_tokens)
        yield (
            f"| {found['peer']} {found['version']} | {found['dtype']} | {perplexity:.4f} | {loss:+.2f} % "
            f"| {equal} of {len(pairs)} | {100 * shared:.0f} % |"
        )
    yield ""
    yield (
        f"{first['processor']}. {len(first['answers'])} rows of {first['workload']} ({first['workload_digest']}), "
        f"{num_tokens:,} tokens of given answers, own answers of at most {first['max_tokens']} tokens."
    )
    for found in runs:
        if "answers" not in found:
            yield f"{found['peer']} {found['dtype']}: {found.get('skipped') or found.get('failed')}"


def _num_shared(a: list[int], b: list[int]) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main() -> None:
    """Read the command line and do the step that it names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("texts", help="token ids of questions and of their answers")
    step.add_argument("--model", required=True, type=Path)
    step.add_argument("--questions", required=True, type=Path, help="JSON Lines with question and answer")
    step.add_argument("--limit", type=int, default=200)
    step.add_argument("--out", required=True, type=Path)
    step = steps.add_parser("run", help="all engines, one after the other")
    step.add_argument("peers", nargs="+", metavar="NAME/DTYPE=PYTHON[:MODEL_DIR]")
    step.add_argument("--model", required=True, type=Path)
    step.add_argument("--workload", required=True, type=Path)
    step.add_argument("--out", required=True, type=Path)
    step.add_argument("--max-tokens", type=int, default=256)
    step = steps.add_parser("table", help="the table of the raw files of a run")
    step.add_argument("raw", type=Path)
    given = parser.parse_args()
    if given.step == "texts":
        make_texts(given)
    elif given.step == "run":
        run(given)
    else:
        runs = [json.loads(path.read_text()) for path in sorted(given.raw.glob("*.json"))]
        sys.stdout.write("\n".join(table(runs)) + "\n")


if __name__ == "__main__":
    main()
