"""Jobs with a budget of thoughts, in the real engine: where they are cut, counts, resumes, formats, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_templates import THINKING
from run_helpers import MODEL, JobMaker, quiet, without_timings

from batchgen.core.errors import UsageError
from batchgen.output.journal import Journal
from batchgen.run.job import run_job
from batchgen.run.loader import load_engine, read_model

OPENED = THINKING.replace("{%- if enable_thinking is defined", "{{- '<think>\\n' }}{%- if enable_thinking is defined")
MARKERS = {"<|fim_pre|>": "<think>", "<|fim_mid|>": "</think>"}  # tokens that the sample model has no use for
CLOSING = 4
OBJECT = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
STRUCTURED = {
    "structured_outputs": {"json": OBJECT, "after": "</think>", "disable_any_whitespace": True},
    "logit_bias": {"7": -100},  # the end token, which the sample model writes soon
    "ignore_eos": False,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The sample model with Qwen3's markers as special tokens; the prompt opens the thoughts."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in MARKERS.items():
            text = text.replace(old, new)
        content = json.loads(text)
        if name == "tokenizer_config.json":
            content["chat_template"] = OPENED
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


class Maker(JobMaker):
    """Jobs of ``model``, which its own engine runs."""

    def keys(self, **sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        base: dict[str, Mapping[str, Any]] = {
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "input": {"id": None, "columns": []},
            "sampling": {"max_tokens": 30, "thinking_token_budget": 6, "ignore_eos": True},
            "output": {"token_ids": True, "parse": ["reasoning"]},
        }
        return super().keys(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}})

    def answers(self, name: str, rows: list[dict[str, Any]], **sections: dict[str, Any]) -> list[Any]:
        self.write(rows)
        return self.elsewhere(name, self.spec(**sections), engine_factory=load_engine)


@pytest.fixture
def maker(model: Path) -> Maker:
    return Maker(model.parent)


ROWS = [{"question": f"Write number {number}", "id": number} for number in range(12)]


def test_thoughts_are_cut_exactly_and_the_answer_follows(maker: Maker) -> None:
    free = maker.answers("free", ROWS, sampling={"thinking_token_budget": None})
    found = maker.answers("cut", ROWS)
    for row, unlimited in zip(found, free, strict=True):
        assert row["token_ids"][:7] == [*unlimited["token_ids"][:6], CLOSING]
        assert (len(row["token_ids"]), row["finish_reason"]) == (30, "length")
        assert row["usage"]["reasoning_tokens"] == 6 and "reasoning_tokens" not in unlimited["usage"]
        assert row["text"] and row["reasoning"].strip() and not unlimited["text"]


def test_every_format_says_how_many_tokens_were_thought(maker: Maker) -> None:
    rows = [*ROWS[:2], {"question": "a", "sampling": {"thinking_token_budget": -1}}]
    for form in ("jsonl", "parquet"):
        found = maker.answers(form, rows, output={"format": form}, sampling={"n": 2, "temperature": 1.0})
        assert [row["usage"].get("reasoning_tokens") for row in found] == [12, 12, None]
        assert all(sample["token_ids"][6] == CLOSING for row in found[:2] for sample in row["samples"])
    found = maker.answers("openai", rows, output={"format": "openai-batch"})
    usages = [row["response"]["body"]["usage"] for row in found]
    assert [usage.get("completion_tokens_details") for usage in usages] == [{"reasoning_tokens": 6}] * 2 + [None]


def test_the_token_that_ends_an_answer_inside_of_its_thoughts_is_none_of_these(maker: Maker) -> None:
    sampling = {"ignore_eos": False, "logit_bias": {"7": 100}, "min_tokens": 3, "thinking_token_budget": 9}
    [row] = maker.answers("ended", ROWS[:1], sampling=sampling)
    assert (len(row["token_ids"]), row["token_ids"][-1], row["finish_reason"]) == (4, 7, "stop")
    assert row["usage"]["reasoning_tokens"] == 3


def test_a_request_in_openais_form_has_a_budget_of_its_own(maker: Maker) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "thinking_token_budget": 2}
    rows = [{"custom_id": "a", "url": "/v1/chat/completions", "body": body}]
    [row] = maker.answers("openai", rows, input={"prompt": None}, output={"format": "openai-batch"})
    [choice] = row["response"]["body"]["choices"]
    assert choice["token_ids"][2] == CLOSING and len(choice["token_ids"]) == 9


def test_a_schema_holds_what_follows_the_marker(maker: Maker) -> None:
    sampling = {**STRUCTURED, "temperature": 1.0, "n": 2}
    for row in maker.answers("schema", ROWS, sampling=sampling, output={"parse": ["reasoning", "json"]}):
        for sample in row["samples"]:
            assert sample["complete"] and sample["parsed"]["n"] in (1, 2)
            assert CLOSING in sample["token_ids"][:7]
        assert row["usage"]["reasoning_tokens"] <= 12


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, STRUCTURED])
def test_a_run_that_is_stopped_at_any_place_of_a_thought_goes_on_from_there(
    maker: Maker, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, save = list[tuple[int, ...]](), Journal.save_partials

    def noted(journal: Journal, tokens: Mapping[int, tuple[int, ...]]) -> None:
        saved.extend(tokens.values())
        save(journal, tokens)

    monkeypatch.setattr(Journal, "save_partials", noted)
    own = [{"max_tokens": 12 + 2 * place, "thinking_token_budget": 2 * place} for place in range(len(ROWS))]
    rows = [row | {"sampling": values} for row, values in zip(ROWS, own, strict=True)]
    expected = maker.answers("whole", rows, sampling=sampling)
    for limit in (1, 200, 300):
        output = {"path": str(maker.folder / f"stopped {limit}")}
        spec = maker.spec(sampling=sampling, engine={"max_num_seqs": 2}, output=output)
        codes = [run_job(spec, quiet(max_total_tokens=limit)).exit_code]
        while codes[-1] == 75:
            codes.append(run_job(spec, quiet(max_total_tokens=limit)).exit_code)
        assert len(codes) > 1 and codes[-1] == 0
        assert without_timings(Path(spec.output.path) / "outputs.jsonl") == expected
    assert any(CLOSING in tokens for tokens in saved) and any(CLOSING not in tokens for tokens in saved)


def test_a_model_that_does_not_think_is_refused_and_so_is_a_row(maker: Maker) -> None:
    spec = maker.spec(model={"path": str(MODEL)})
    with pytest.raises(UsageError, match=r"^sampling\.thinking_token_budget = 6: this model does not think: neither"):
        read_model(spec).builder(spec)
    rows = [*ROWS[:1], {"question": "a", "sampling": {"thinking_token_budget": 0}}]
    sections = {"model": {"path": str(MODEL)}, "sampling": {"thinking_token_budget": None}}
    assert len(maker.answers("out", rows, **sections)) == 1
    [error] = maker.errors()
    assert (error["code"], error["message"][:25]) == ("bad_param", "thinking_token_budget = 0")


def test_values_that_cannot_be_are_refused(maker: Maker) -> None:
    for sampling, message in (
        ({"thinking_token_budget": -2}, r"must be an integer from -1 to"),
        ({"thinking_token_budget": True}, r"must be an integer from -1 to"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": False}, r'give its key after, such as "</think>"'),
    ):
        with pytest.raises(UsageError, match=message):
            maker.spec(sampling=sampling)
