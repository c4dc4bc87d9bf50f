"""Jobs whose rows become vectors or labels: records, formats, resume, bad rows, refusals."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from run_helpers import ENVIRONMENT, MODEL, REPOSITORY, Shell, read_lines, without_timings, write_lines
from safetensors.torch import load_file, save_file
from vector_models import CLS, pooling_of, vector_settings

from batchgen import LLM, run_job
from batchgen.bench import measure
from batchgen.cli.main import call
from batchgen.core.errors import UsageError
from batchgen.core.records import Request
from batchgen.output.rundir import RunDir
from batchgen.run.reports import compared_answers, read_report, shown_rows

NORMALIZE = {"type": "sentence_transformers.models.Normalize"}
TEXTS = [f"text {i}: {'word ' * (i % 37)}end" for i in range(60)]
WIDTH = 192


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The sample model's weights as those of a bidirectional embedding model."""
    path = tmp_path / "model"
    shutil.copytree(MODEL, path)
    change(path, architectures=["Lfm2BidirectionalModel"])
    vector_settings(path, pooling_of(CLS), NORMALIZE, prompts={"query": "query: ", "document": "document: "})
    write_lines(tmp_path / "rows.jsonl", ({"text": text} for text in TEXTS))
    return path


def change(model: Path, **values: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def command(*words: object) -> int:
    return call([str(word) for word in words])  # not ``main``, which leaves its process deaf to signals


def run(folder: Path, *flags: object, output: str = "run", rows: str = "rows.jsonl") -> tuple[int, Path]:
    place = folder.parent / output
    words = ["run", "--model", folder, "--input", folder.parent / rows, "--output", place, "--quiet", *flags]
    return command(*words), place


def matrix(path: Path) -> np.ndarray:
    return np.array([row["embedding"] for row in read_lines(path / "outputs.jsonl")], dtype=np.float32)


def test_each_row_gets_a_vector_of_length_one(folder: Path) -> None:
    code, place = run(folder)
    assert code == 0
    found = matrix(place)
    assert found.shape == (len(TEXTS), WIDTH)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    first = read_lines(place / "outputs.jsonl")[0]
    assert [*first] == ["id", "index", "fingerprint", "embedding", "usage", "timings", "text"]
    assert first["usage"]["completion_tokens"] == 0
    report = json.loads((place / "report.json").read_text(encoding="utf-8"))
    assert report["rows"]["done"] == len(TEXTS)
    assert report["tokens"]["prompt"] > len(TEXTS)


def test_a_prompt_is_put_before_each_text(folder: Path) -> None:
    flags = ([], ["--embed-prompt", "query"], ["--embed-prompt", "query: "])
    none, by_name, by_prefix = (matrix(run(folder, *more, output=f"{i}")[1]) for i, more in enumerate(flags))
    assert np.array_equal(by_name, by_prefix) and not np.array_equal(by_name, none)


def test_dimensions_are_cut_before_vectors_are_normalized(folder: Path) -> None:
    whole, cut = matrix(run(folder, output="a")[1]), matrix(run(folder, "--dimensions", 16, output="b")[1])
    assert np.allclose(cut, whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True), atol=1e-6)


def test_parquet_holds_lists_of_one_size(folder: Path) -> None:
    wanted = matrix(run(folder, output="a")[1])
    _, place = run(folder, "--output-format", "parquet", output="b")
    table = pq.read_table(place / "outputs.parquet")
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), WIDTH)
    assert "finish_reason" not in table.schema.names
    assert np.array_equal(np.stack(table["embedding"].to_numpy()), wanted)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_kept_column_with_the_form_of_a_packed_array_stays_as_it_is(form: str, folder: Path) -> None:
    columns = [{"dtype": "int32", "shape": [1], "base64": text} for text in ("AQAAAA==", "!!")]
    rows = [{"text": "a", "top_ids": column, "assistant_mask": column} for column in columns]
    write_lines(folder.parent / "rows.jsonl", rows)
    code, place = run(folder, "--output-format", form)
    assert code == 0
    records = run_job(place).rows
    assert [record["top_ids"] for record in records] == columns
    assert [record["assistant_mask"] for record in records] == columns
    assert len(records[0]["embedding"]) == WIDTH


@pytest.mark.parametrize(("before", "now"), [("parquet", "jsonl"), ("jsonl", "parquet")])
def test_an_unfinished_run_goes_on_in_another_format(before: str, now: str, folder: Path) -> None:
    _, fresh = run(folder, "--output-format", now, output="fresh")
    assert run(folder, "--output-format", before, "--max-num-seqs", 4, "--max-total-tokens", 300)[0] == 75
    _, place = run(folder, "--output-format", now)
    name = f"outputs.{now}"
    assert without_timings(place / name) == without_timings(fresh / name)


def test_vectors_of_two_formats_are_compared_by_their_numbers(folder: Path) -> None:
    lines, table = (RunDir(run(folder, "--output-format", form, output=form)[1]) for form in ("jsonl", "parquet"))
    changes = compared_answers(table, lines)
    assert changes is not None
    assert (changes["rows"], changes["equal"]) == (len(TEXTS), len(TEXTS))
    [_, shown, *_] = shown_rows(table, read_report(table))
    assert shown.rows[0][-1] == f"embedding of {WIDTH} numbers"


def test_late_interaction_has_a_vector_for_each_token(folder: Path) -> None:
    (folder / "1_Dense").mkdir()
    torch.manual_seed(0)
    save_file({"linear.weight": torch.randn(8, WIDTH)}, folder / "1_Dense" / "model.safetensors")
    dense = {"type": "pylate.models.Dense.Dense", "in_features": WIDTH, "out_features": 8, "bias": False}
    vector_settings(folder, {**dense, "activation_function": "torch.nn.modules.linear.Identity"})
    _, place = run(folder, "--embed-normalize", "true", "--output-format", "parquet")
    table = pq.read_table(place / "outputs.parquet")
    assert table.schema.field("embeddings").type == pa.list_(pa.list_(pa.float32(), 8))
    for row in table.to_pylist():
        assert len(row["embeddings"]) == row["usage"]["prompt_tokens"]
        assert np.allclose(np.linalg.norm(row["embeddings"], axis=1), 1, atol=1e-5)


def classifier(folder: Path, **values: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    weights["score.weight"] = torch.randn(3, WIDTH).to(next(iter(weights.values())).dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "modules.json").unlink()
    labels = {"0": "red", "1": "green", "2": "blue"}
    change(folder, architectures=["Lfm2ForSequenceClassification"], id2label=labels, **values)


def test_a_classifier_gives_labels_and_counts_the_right_ones(folder: Path) -> None:
    classifier(folder)
    _, place = run(folder, output="a")
    rows = read_lines(place / "outputs.jsonl")
    for row in rows:
        assert row["label"] == max(row["scores"], key=row["scores"].get)
        assert row["score"] == max(row["scores"].values())
        assert sum(row["scores"].values()) == pytest.approx(1, abs=1e-5)
    labelled = [{"text": text, "right": row["label"]} for text, row in zip(TEXTS, rows, strict=True)]
    write_lines(folder.parent / "labelled.jsonl", labelled)
    _, place = run(folder, "--expected", "right", output="b", rows="labelled.jsonl")
    accuracy = json.loads((place / "report.json").read_text(encoding="utf-8"))["accuracy"]
    assert accuracy == {"correct": len(TEXTS), "total": len(TEXTS), "exact_match": 1.0} | accuracy


def test_several_labels_may_hold(folder: Path) -> None:
    classifier(folder, problem_type="multi_label_classification")
    _, place = run(folder, "--output-format", "parquet")
    sums = [sum(row["scores"].values()) for row in pq.read_table(place / "outputs.parquet").to_pylist()]
    assert max(abs(total - 1) for total in sums) > 0.01


def test_openai_lines(folder: Path) -> None:
    from openai.types import CreateEmbeddingResponse

    bodies = [
        {"input": "hello there", "encoding_format": "base64", "model": "x"},
        {"input": ["hello there"], "model": "x", "dimensions": WIDTH},
        {"input": ["hello there", "b"]},
        {"input": [9, 10, 11]},
        {"input": ""},
        {"input": "x", "dimensions": 3},
        {"messages": [{"role": "user", "content": "x"}]},
        {"input": "x", "colour": 1},
        {"input": "x", "encoding_format": "hex"},
    ]
    write_lines(folder.parent / "lines.jsonl", ({"custom_id": str(i), "body": body} for i, body in enumerate(bodies)))
    code, place = run(folder, "--input-format", "openai-batch", "--output-format", "openai-batch", rows="lines.jsonl")
    assert code == 3
    found = {line["custom_id"]: line["response"]["body"] for line in read_lines(place / "outputs.jsonl")}
    assert [*found] == ["0", "1", "2", "3"]
    plain = CreateEmbeddingResponse.model_validate(found["1"]).data[0].embedding
    packed = np.frombuffer(base64.b64decode(found["0"]["data"][0]["embedding"]), "<f4")
    assert np.array_equal(packed, np.array(plain, dtype=np.float32))
    codes = [line["error"]["code"] for line in read_lines(place / "errors.jsonl")]
    assert codes == ["empty_prompt", *["bad_param"] * 4]
    assert command("report", place) == 0


def lists(folder: Path, *inputs: Any, **body: Any) -> None:
    lines = [{"custom_id": str(i), "body": {"input": given, **body}} for i, given in enumerate(inputs)]
    write_lines(folder.parent / "lists.jsonl", lines)


def answers(place: Path) -> list[Any]:
    from openai.types import CreateEmbeddingResponse

    bodies = [line["response"]["body"] for line in read_lines(place / "outputs.jsonl")]
    return [CreateEmbeddingResponse.model_validate(body, strict=True) for body in bodies]


def test_a_list_gets_a_vector_for_each_text_as_if_it_stood_alone(folder: Path) -> None:
    openai = ("--output-format", "openai-batch", "--embed-prompt", "query: ")
    lists(folder, TEXTS[0], TEXTS[1], [9, 10, 11], [TEXTS[0], TEXTS[1]], [[9, 10, 11], TEXTS[1], TEXTS[1]], [TEXTS[0]])
    _, place = run(folder, *openai, rows="lists.jsonl")
    one, two, ids, pair, three, single = answers(place)
    vectors = [answer.data[0].embedding for answer in (one, two, ids)]
    assert [item.embedding for item in pair.data] == vectors[:2]
    assert [item.embedding for item in three.data] == [vectors[2], vectors[1], vectors[1]]
    assert [item.index for item in three.data] == [0, 1, 2]
    assert single == one
    assert pair.usage.prompt_tokens == one.usage.prompt_tokens + two.usage.prompt_tokens
    whole = without_timings(place / "outputs.jsonl")
    for flags in ("--max-num-seqs 1", "--max-num-batched-tokens 16", "--workers 2", "--without share-duplicates"):
        _, other = run(folder, *openai, *flags.split(), output=flags, rows="lists.jsonl")
        assert without_timings(other / "outputs.jsonl") == whole
    _, again = run(folder, *openai, "--reuse", place, output="again", rows="lists.jsonl")
    assert without_timings(again / "outputs.jsonl") == whole
    assert all(row["timings"]["reused"] for row in read_lines(again / "outputs.jsonl"))


def test_lists_of_the_same_tokens_cut_elsewhere_are_other_requests(folder: Path) -> None:
    lists(folder, [[9, 10], [11]], [[9], [10, 11]], [[9, 10, 11]], [[9, 10], [11]])
    _, place = run(folder, "--reuse", folder.parent / "run", rows="lists.jsonl")
    first, second, third, fourth = read_lines(place / "outputs.jsonl")
    assert (len(first["embeddings"]), len(third["embedding"])) == (2, WIDTH)
    assert first["embeddings"] != second["embeddings"] and first["embeddings"] == fourth["embeddings"]
    fingerprints = [row["fingerprint"] for row in (first, second, third)]
    assert len({*fingerprints}) == 3


@pytest.mark.parametrize("form", ["jsonl", "parquet", "openai-batch"])
def test_lists_of_an_earlier_run_are_reused_from_any_format(form: str, folder: Path) -> None:
    lists(folder, ["a", "b"], "a", encoding_format="base64")
    wanted = without_timings(run(folder, output="a", rows="lists.jsonl")[1] / "outputs.jsonl")
    _, earlier = run(folder, "--output-format", form, output="b", rows="lists.jsonl")
    _, place = run(folder, "--reuse", earlier, output="c", rows="lists.jsonl")
    assert without_timings(place / "outputs.jsonl") == wanted
    assert all("reused" in row["timings"] for row in read_lines(place / "outputs.jsonl"))


def test_a_list_fails_as_a_whole_and_by_the_text_that_is_wrong(folder: Path) -> None:
    lists(folder, ["a", ""], ["a", 7], [[9], [10**6]], ["a"] * 2049, [], [["a"]], "a")
    code, place = run(folder, rows="lists.jsonl")
    assert code == 3
    said = [(row["code"], row["message"]) for row in read_lines(place / "errors.jsonl")]
    assert [code for code, _ in said] == ["empty_prompt", "bad_type", *["bad_param"] * 2, "empty_prompt", "bad_type"]
    parts = ["input[1]", "input[1]", "input[1]", "2,049 texts: at most 2,048"]
    assert all(part in message for (_, message), part in zip(said, parts, strict=False))
    code, place = run(folder, "--no-truncate", "--max-model-len", 16, output="long", rows="lists.jsonl")
    assert command("plan", "--model", folder, "--input", folder.parent / "lists.jsonl", "--output", place) == 0


def test_vectors_of_tokens_are_those_of_one_text(folder: Path) -> None:
    lists(folder, ["a", "b"], ["a"])
    code, place = run(folder, "--pooling", "tokens", rows="lists.jsonl")
    [failed] = read_lines(place / "errors.jsonl")
    assert code == 3 and failed["message"] == "body field 'input' holds 2 texts: give each its own line"


def test_long_texts_are_cut_or_refused(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}), encoding="utf-8")
    long = "word " * 100_000
    rows = [{"text": long}, {"text": long[:400]}, {"prompt_token_ids": [9] * 100}, {"text": "short"}]
    write_lines(folder.parent / "long.jsonl", rows)
    code, place = run(folder, output="a", rows="long.jsonl")
    assert code == 0
    found = read_lines(place / "outputs.jsonl")
    assert [row["usage"]["prompt_tokens"] for row in found][:3] == [32] * 3
    assert found[0]["embedding"] == found[1]["embedding"]
    code, place = run(folder, "--no-truncate", output="b", rows="long.jsonl")
    assert code == 3
    assert [row["code"] for row in read_lines(place / "errors.jsonl")] == ["too_long"] * 3


def test_a_run_and_a_plan_count_texts_that_may_have_been_cut(folder: Path, shell: Shell) -> None:
    rows = [{"text": "word " * 100}, {"text": "word " * 90}, {"text": "short"}]
    write_lines(folder.parent / "long.jsonl", rows)
    said = "2 texts may have been cut at 32 tokens, the most that the model takes: --no-truncate refuses longer texts"
    for name in ("plan", "run"):
        words = [name, folder.parent / "long.jsonl", "-m", folder, "--max-model-len", 32, "-o", folder.parent / "run"]
        assert said in shell(*words).words


def test_workers_and_kills_change_no_byte(folder: Path) -> None:
    wanted = without_timings(run(folder, output="a")[1] / "outputs.jsonl")
    assert without_timings(run(folder, "--workers", 2, output="b")[1] / "outputs.jsonl") == wanted
    words = [sys.executable, "-m", "batchgen", "run", "--model", folder, "--input", folder.parent / "rows.jsonl"]
    place = folder.parent / "c"
    for _ in range(3):
        process = subprocess.Popen([*words, "--output", place, "-q", "--max-num-seqs", "2"], env=ENVIRONMENT)
        until = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < until and not any(place.glob("journal/*")):
            time.sleep(0.05)
        process.kill()
        process.wait()
    assert run(folder, output="c")[0] == 0
    assert without_timings(place / "outputs.jsonl") == wanted


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_vectors_of_an_earlier_run_are_reused(form: str, folder: Path) -> None:
    wanted = without_timings(run(folder, output="a")[1] / "outputs.jsonl")
    run(folder, "--limit", 40, "--output-format", form, output="b")
    _, place = run(folder, "--reuse", folder.parent / "b", output="c")
    assert without_timings(place / "outputs.jsonl") == wanted
    assert sum("reused" in row["timings"] for row in read_lines(place / "outputs.jsonl")) == 40
    _, place = run(folder, "--reuse", folder.parent / "b", "--pooling", "mean", output="d")
    assert not any("reused" in row["timings"] for row in read_lines(place / "outputs.jsonl"))


def test_other_settings_are_not_resumed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder)[0] == 0
    assert run(folder, "--pooling", "cls")[0] == 0  # what "auto" stands for
    assert run(folder, "--pooling", "mean")[0] == 2
    assert "embed.pooling" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--temperature", "0.5"], "write [embed] instead of [sampling]"),
        (["--pooling", "cls", "--max-tokens", "3"], "exclude each other"),
        (["--dimensions", "1000"], "192"),
        (["--extract", "last_number"], "eval.extract is for text"),
        (["--expected", "answer"], "neither"),
        (["--parse", "json"], "output.parse is for text"),
        (["--pooling", "max"], "must be one of"),
        (["--pooling", "tokens", "--output-format", "openai-batch"], "has no place for embeddings of tokens"),
        (["--embed-normalize", "perhaps"], "true or false"),
    ],
)
def test_refusals(folder: Path, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, *flags)[0] == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


def test_a_loaded_model_gives_the_vectors_and_labels_of_a_run(folder: Path) -> None:
    run(folder)
    with LLM(folder) as model:
        assert np.array_equal(model.embed(TEXTS), matrix(folder.parent / "run"))
        table = model(pa.table({"text": TEXTS[:5]}))
    assert table.column_names == ["text", "usage", "timings", "embedding", "error"]
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float32), matrix(folder.parent / "run")[:5])
    classifier(folder)
    _, place = run(folder, output="labels")
    with LLM(folder) as model:
        told = [(row["label"], row["scores"]) for row in model.classify(TEXTS)]
        assert told == [(row["label"], row["scores"]) for row in read_lines(place / "outputs.jsonl")]
        with pytest.raises(UsageError, match="labels of its own: red, green, blue"):
            model.classify(TEXTS, ["a", "b"])


def test_a_text_model_needs_a_pooling(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = shutil.copytree(MODEL, folder.parent / "plain")
    assert run(plain, "--pooling", "auto")[0] == 2
    assert "cls, last or mean" in capsys.readouterr().err
    assert run(plain, "--pooling", "mean", output="b")[0] == 0


def test_check_compares_hidden_states(folder: Path, shell: Shell) -> None:
    found = shell("check", "--model", folder, "--json").json
    assert [proof["num_tokens"] for proof in found["proofs"]] == [found["num_prompt_tokens"]] * 2


def test_bench_measures_texts_as_the_checkpoint_pools_them(
    folder: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("bench", "--model", folder, "--num-requests", 5, "--input-len", "3:9", "--repeats", 1)
    assert "--texts" in shell(*words, code=2).err
    asked, run_once = [], measure._run

    def noted(bench: Any, requests: list[Request], note: str) -> Any:
        asked.append({request.pooling for request in requests})
        return run_once(bench, requests, note)

    monkeypatch.setattr(measure, "_run", noted)
    found = shell(*words, "--texts", "--json").json
    assert found["num_requests_tokens"]["output"] == 0
    assert found["requests_per_s"] == pytest.approx(5 / found["wall_s"])
    assert asked == [{"cls"}] * len(asked)
    asked.clear()
    assert "texts/s" in shell("bench", "--texts", "mean", *words[1:]).out
    assert asked == [{"mean"}] * len(asked)


def test_plan_counts_the_tokens(folder: Path, shell: Shell) -> None:
    words = ("plan", "--model", folder, "--input", folder.parent / "rows.jsonl", "--output", folder.parent / "x")
    told = shell(*words).out
    assert f"{len(TEXTS)} can run" in told
    assert "tokens out   none" in told
    assert "estimate     none" in told
    assert run(folder, output="x")[0] == 0
    estimate = shell(*words, "--json").json["estimate"]
    assert estimate["basis"] == "the last run's rate"
    assert estimate["wall_s"] > 0


def test_the_recipe_runs(tmp_path: Path) -> None:
    assert command("run", REPOSITORY / "jobs" / "embeddings.toml", "--output", tmp_path / "run", "-q") == 0
