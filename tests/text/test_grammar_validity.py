"""Every complete text fits what was asked for, whatever the logits: JSON schemas, choices, grammars."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from guides import complete_texts
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from json_schemas import problem, schemas
from repeats import nightly
from schema_samples import SAMPLES
from tiny_model import engine_for, tiny_model

from batchgen.core.records import Request, SamplingParams
from batchgen.core.structured import canonical
from batchgen.engine.generation import TextTools
from batchgen.text.grammar import Grammars
from batchgen.text.grammar_source import GrammarError


@pytest.mark.parametrize("count", [40, nightly(300)])
def test_complete_json_fits_its_schema(grammars: Grammars, count: int) -> None:
    """Also: whatever is satisfiable stays so when objects are closed."""
    texts: list[str] = []

    @settings(max_examples=count)
    @given(schemas(), st.sampled_from([{}, {"disable_any_whitespace": True}, {"whitespace_pattern": r"\s{0,2}"}]))
    def check(schema: dict[str, Any], options: dict[str, Any]) -> None:
        try:
            free = complete_texts(grammars, {"json": schema, "disable_additional_properties": False, **options}, [0])
        except GrammarError:
            assume(False)
        found = [*free, *complete_texts(grammars, {"json": schema, **options}, range(1, 5))]
        assert [why for text in found if (why := problem(schema, text))] == []
        texts.extend(found)

    check()
    assert len(texts) > 4 * count  # of five for each schema; some run on to their most tokens


@pytest.mark.parametrize("name", SAMPLES)
def test_schemas_as_people_have_them(grammars: Grammars, name: str) -> None:
    texts = complete_texts(grammars, {"json": SAMPLES[name]}, range(6))
    assert texts
    assert [why for text in texts if (why := problem(SAMPLES[name], text))] == []


@settings(max_examples=80)
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6))
@example(["a", "ab", "abc", "a b"])
@example(['"', "\\", "\n", "\r\n", "\0", "|", "/", "é", "e\u0301", "🙂", "\ufffd", "\u2028"])
@example(["<|im_end|>", "<|im_end|> and more", "x<|im_start|>y"])
@example(["<|im_end|>"])
def test_a_choice_is_one_of_the_texts(grammars: Grammars, choice: list[str]) -> None:
    found = complete_texts(grammars, {"choice": choice}, range(6))
    assert len(found) == 6
    assert set(found) <= set(choice)


def test_each_choice_can_come(grammars: Grammars) -> None:
    choice = ["a", "ab", "b", "<|im_end|>", "🙂"]
    assert set(complete_texts(grammars, {"choice": choice}, range(120))) == set(choice)


def test_a_grammar_is_lark(grammars: Grammars) -> None:
    texts = complete_texts(grammars, {"grammar": 'start: "a" (B | "c")+\nB: /b{2,3}/'}, range(20))
    assert len(set(texts)) > 5
    assert all(re.fullmatch("a(?:b{2,3}|c)+", text) for text in texts)


def test_gbnf_is_refused_by_its_name(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match=r"the grammar is GBNF \(root ::= \.\.\.\): write it in Lark"):
        grammars.check(canonical({"grammar": 'root ::= "a"'}))


def test_what_an_engine_writes_fits(grammars: Grammars) -> None:
    """Sampled by a random model, several rows at once: what the record calls complete, and nothing else."""
    asked = [{"json": schema} for schema in SAMPLES.values()]
    params = SamplingParams(max_tokens=150, temperature=1.5, n=3)
    requests = [
        Request(key, (9, 30 + key), replace(params, structured_outputs=canonical(one))) for key, one in enumerate(asked)
    ]
    model = tiny_model(torch.float32, vocab_size=grammars.vocab_size)
    parts = {"text": TextTools(None, grammars), "eos_token_ids": grammars.eos_token_ids}
    engine = engine_for(model, num_blocks=200, block_size=16, parts=parts)
    complete = set()
    for result in engine.run(requests):
        assert result.error is None, result.error
        for sample in result.samples:
            token_ids = [token for token in sample.token_ids if token not in grammars.eos_token_ids]
            why = problem(asked[result.key]["json"], grammars.tokenizer.decode(token_ids))
            assert bool(why) != sample.is_complete, why
            complete.add(sample.is_complete)
    assert complete == {True, False}


def test_any_object_is_asked_for_by_name(grammars: Grammars) -> None:
    texts = complete_texts(grammars, {"json_object": True}, range(10))
    assert texts
    assert {problem({"type": "object"}, text) for text in texts} == {""}
