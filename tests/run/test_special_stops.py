"""Jobs whose stop strings are special tokens, or hold some: they end an answer, and its text ends before them."""

from __future__ import annotations

from typing import Any

import pytest
from run_helpers import JobMaker, rows_of

from batchgen.config.job import JobSpec
from batchgen.input.openai_batch import CHAT_URL
from batchgen.run.loader import load_engine

MODEL, OUTPUT, ENGINE = {"dtype": "float32"}, {"token_ids": True}, {"threads": 1}
IM_END = 7  # the sample model ends its answers with it, and goes on behind it where it may


def spec_of(job: JobMaker, **sampling: Any) -> JobSpec:
    sampling = {"max_tokens": 40, "ignore_eos": True, **sampling}
    return job.spec(model=MODEL, output=OUTPUT, sampling=sampling, engine=ENGINE)


def answered(job: JobMaker, name: str, spec: JobSpec) -> list[dict[str, Any]]:
    return job.elsewhere(name, spec, engine_factory=load_engine)


@pytest.fixture
def whole(job: JobMaker) -> list[dict[str, Any]]:
    """Answers that nothing but their length ends."""
    job.write(rows_of(4))
    found = answered(job, "whole", spec_of(job))
    assert all(IM_END in row["token_ids"] and row["finish_reason"] == "length" for row in found)
    return found


def test_a_stop_string_that_is_a_special_token_ends_an_answer(job: JobMaker, whole: list[dict[str, Any]]) -> None:
    for row, before in zip(answered(job, "ended", spec_of(job, stop=["<|im_end|>"])), whole, strict=True):
        ids = before["token_ids"]
        assert row["token_ids"] == ids[: ids.index(IM_END) + 1]
        assert row["finish_reason"] == "stop"
        assert before["text"].startswith(row["text"])


def test_a_stop_string_may_hold_text_beside_a_special_token(job: JobMaker, whole: list[dict[str, Any]]) -> None:
    ended = answered(job, "ended", spec_of(job, stop=["<|im_end|>"]))
    last = ended[0]["text"][-1]
    [row, *_] = answered(job, "beside", spec_of(job, stop=[f"{last}<|im_end|>"]))
    assert row["token_ids"] == ended[0]["token_ids"]
    assert (row["text"], row["finish_reason"]) == (ended[0]["text"][:-1], "stop")
    assert whole[0]["text"].startswith(row["text"])


def test_a_row_may_ask_for_it_in_each_format(job: JobMaker, whole: list[dict[str, Any]]) -> None:
    rows = rows_of(4)
    job.write(row | {"sampling": {"stop": ["<|im_end|>"]}} for row in rows)
    expected = answered(job, "rows", spec_of(job))
    assert [row["token_ids"] for row in expected] != [row["token_ids"] for row in whole]
    body = {"max_tokens": 40, "ignore_eos": True, "stop": "<|im_end|>"}
    line = {"method": "POST", "url": CHAT_URL.replace("chat/", "")}
    job.write({"custom_id": row["id"], **line, "body": body | {"prompt": row["question"]}} for row in rows)
    of_lines = {"id": None, "prompt": None, "format": "openai-batch", "chat_template": "none"}
    found = answered(job, "lines", job.spec(model=MODEL, input=of_lines, output=OUTPUT, engine=ENGINE))
    assert [row["token_ids"] for row in found] == [row["token_ids"] for row in expected]
