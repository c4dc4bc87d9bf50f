"""Jobs whose texts get a vector for each token: queries and documents as PyLate and sentence-transformers make them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from late_models import MARKERS, SIDES, WIDTH, as_sentence_transformers, late_vectors, saved_late, texts
from run_helpers import read_lines, without_timings, write_lines

from batchgen.cli.main import call

TEXTS = texts(24)
RECIPES = Path(__file__).resolve().parents[2] / "batchgen" / "docs" / "recipes.md"
EXPANSIONS: dict[str, dict[str, Any]] = {
    "unseen": {},
    "attended": {"attend_to_expansion_tokens": True},
    "none": {"do_query_expansion": False},
}

CASES = [
    ("lfm2", "document", "unseen"),
    *(("lfm2", "query", name) for name in EXPANSIONS),
    ("llama", "query", "unseen"),
]


def run(
    folder: Path, side: str | None, *flags: object, output: str = "run", rows: Sequence[str] = TEXTS
) -> tuple[int, Path]:
    place = folder.parent
    write_lines(place / "rows.jsonl", ({"text": text} for text in rows))
    words = ["run", place / "rows.jsonl", "--model", folder, "--output", place / output, "--quiet", *flags]
    words += ["--embed-prompt", side] if side else []
    return call([*map(str, words)]), place / output


def vectors(place: Path) -> list[np.ndarray]:
    return [np.array(row["embeddings"], np.float32) for row in read_lines(place / "outputs.jsonl")]


def assert_equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert [len(each) for each in found] == [len(each) for each in wanted]
    assert max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)) < 1e-5


@pytest.mark.parametrize(("family", "side", "expansion"), CASES)
def test_vectors_are_those_of_the_formulas_alone_and_in_company(
    family: str, side: str, expansion: str, tmp_path: Path
) -> None:
    folder = saved_late(tmp_path / "model", family, **EXPANSIONS[expansion])
    code, place = run(folder, side, "--dtype", "float32")
    assert code == 0
    assert_equal(vectors(place), late_vectors(folder, side, TEXTS))
    for flags in (["--max-num-seqs", 1], ["--max-num-batched-tokens", 16], ["--without", "share-duplicates"]):
        _, other = run(folder, side, "--dtype", "float32", *flags, output=f"other{flags[0]}")
        assert without_timings(other / "outputs.jsonl") == without_timings(place / "outputs.jsonl")


@pytest.mark.parametrize("family", ["lfm2", "llama"])
def test_vectors_and_ranks_are_those_of_pylate(family: str, tmp_path: Path) -> None:
    models = pytest.importorskip("pylate.models")
    folder = saved_late(tmp_path / "model", family)
    model, found = models.ColBERT(str(folder), device="cpu", model_kwargs={"dtype": torch.float32}), []
    count, scores = 200, []
    for make in (lambda side: vectors(run(folder, side, "--dtype", "float32", output=side, rows=texts(count))[1]),
                 lambda side: model.encode(texts(count), is_query=side == "query", batch_size=7)):  # fmt: skip
        queries, documents = (make(side) for side in SIDES)
        scores.append([[(q @ d.T).max(1).sum() for d in documents] for q in queries[:20]])
        found.append(queries + documents)
    assert_equal(*found)
    order = np.argsort(-np.array(scores[0]), axis=1)
    assert (np.diff(np.take_along_axis(np.array(scores[1]), order, axis=1)) < 1e-5).all()


@pytest.mark.parametrize("side", SIDES)
def test_the_settings_of_sentence_transformers_mean_the_same(side: str, tmp_path: Path) -> None:
    folder = saved_late(tmp_path / "model", "lfm2")
    _, place = run(folder, side, output="pylate")
    as_sentence_transformers(folder)
    _, other = run(folder, side)
    assert all(map(np.array_equal, vectors(other), vectors(place)))


def test_the_recipe_ranks_documents_by_maxsim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    folder = saved_late(tmp_path / "runs" / "model", "lfm2")
    code = RECIPES.read_text(encoding="utf-8").partition("## Late interaction")[2].split("```")[3]
    for side, output in (("query", "queries"), ("document", "documents")):
        run(folder, side, "--output-format", "parquet", output=output)
    monkeypatch.chdir(tmp_path)
    exec(code.removeprefix("python\n"), {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    queries, documents = (pq.read_table(f"runs/{name}/outputs.parquet") for name in ("queries", "documents"))
    q, *_ = (np.array(each) for each in queries["embeddings"].to_pylist())
    scores = [(q @ np.array(d).T).max(1).sum() for d in documents["embeddings"].to_pylist()]
    assert [int(line[1]) for line in lines[:5]] == np.argsort(-np.array(scores), kind="stable")[:5].tolist()
    assert len(lines) == 5 * len(TEXTS)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parquet_holds_lists_of_vectors_of_the_type_asked_for(dtype: str, tmp_path: Path) -> None:
    folder = saved_late(tmp_path / "model", "lfm2")
    _, plain = run(folder, "document", output="plain")
    _, place = run(folder, "document", "--embed-dtype", dtype, "--output-format", "parquet")
    table = pq.read_table(place / "outputs.parquet")
    kind = pa.float16() if dtype == "float16" else pa.float32()
    assert table.schema.field("embeddings").type == pa.list_(pa.list_(kind, WIDTH))
    for row, wanted in zip(table["embeddings"].to_pylist(), vectors(plain), strict=True):
        assert np.array_equal(np.array(row, dtype), wanted.astype(dtype))


def test_a_side_must_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved_late(tmp_path / "model", "lfm2")
    for side in (None, "query: "):
        assert run(folder, side)[0] == 2
        assert "choose with --embed-prompt query or --embed-prompt document" in capsys.readouterr().err
    assert run(folder, "query", "--pooling", "mean")[0] == 2
    assert 'leave embed.pooling = "mean" out' in capsys.readouterr().err


def test_a_text_of_skipped_tokens_alone_is_a_failed_row(tmp_path: Path) -> None:
    words = [".", ",", "<|startoftext|>", *MARKERS.values()]
    folder = saved_late(tmp_path / "model", "lfm2", skiplist_words=words)
    code, place = run(folder, "document", rows=[".", "rain ."])
    assert code == 3
    [failed] = read_lines(place / "errors.jsonl")
    assert "each token of this text is one whose vector the checkpoint leaves out" in failed["message"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"query_prefix": "[nowhere]"}, "marks texts with the token '[nowhere]', which its tokenizer lacks"),
        ({"skiplist_words": "."}, "skiplist_words must be a list of texts, not '.'"),
        ({"query_length": 1}, "query_length must be an integer from 3 up, not 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(saved_late(tmp_path / "model", "lfm2", **changes), "query")[0] == 2
    assert told in capsys.readouterr().err
