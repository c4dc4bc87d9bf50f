"""The typed log-probabilities of a run beside those that transformers computes, and as other packages read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from run_helpers import MODEL, write_lines

from batchgen.cli.main import call

pytestmark = pytest.mark.breadth  # for the packages that it imports
K = 64


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    rng = np.random.default_rng(0)
    rows = [{"prompt_token_ids": rng.integers(10, 600, length).tolist()} for length in (1, 2, 7, 40, 150)]
    path = write_lines(folder / "rows.jsonl", rows)
    words = ["run", path, "-m", MODEL, "-o", folder / "out", "--dtype", "float32", "--max-tokens", "0"]
    words += ["--prompt-logprobs", K, "--output-format", "parquet", "--quiet"]
    assert call([*map(str, words)]) == 0
    return folder / "out" / "outputs.parquet"


def test_the_numbers_are_those_of_transformers(outputs: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for row in pq.read_table(outputs).to_pylist():
        ids = torch.tensor(row["prompt_token_ids"])
        with torch.inference_mode():
            wanted = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        assert len(row["prompt_top_ids"]) == len(ids) - 1
        for place, (own, top_ids, top) in enumerate(
            zip(row["prompt_logprobs"], row["prompt_top_ids"], row["prompt_top_logprobs"], strict=True)
        ):
            assert own == pytest.approx(float(wanted[place, ids[place + 1]]), abs=1e-4)
            assert top == pytest.approx(wanted[place, top_ids].tolist(), abs=1e-4)
            assert top == pytest.approx(wanted[place].topk(K).values.tolist(), abs=1e-4)


def test_pandas_and_datasets_read_the_table_without_code(outputs: Path, tmp_path: Path) -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    frame = pandas.read_parquet(outputs)
    rows: Any = datasets.Dataset.from_parquet(str(outputs), cache_dir=str(tmp_path)).with_format("torch")
    for number, length in enumerate((1, 2, 7, 40, 150)):
        assert len(frame["prompt_top_ids"][number]) == length - 1
        if length > 1:
            table = np.stack(list(frame["prompt_top_logprobs"][number]))
            assert table.shape == rows[number]["prompt_top_logprobs"].shape == (length - 1, K)
            assert np.allclose(rows[number]["prompt_top_logprobs"], table)
