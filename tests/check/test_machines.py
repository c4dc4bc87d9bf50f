"""Machines are compared by every bit that they compute; the first difference is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from run_helpers import MODEL

from batchgen.check.machines import Bits, Comparison, bits_here
from batchgen.config.load import load_job
from batchgen.core.errors import ModelError

PROMPTS = [(5, 9, 11), (7,) * 20]


@pytest.fixture(scope="module")
def bits() -> Bits:
    spec = load_job(None, {"model": {"path": str(MODEL)}, "engine": {"threads": 1}}, needs=("model",))
    return bits_here(spec, PROMPTS)


def test_a_machine_tells_the_digest_of_every_logit(bits: Bits) -> None:
    assert {key: len(tokens) for key, tokens in bits.tokens.items()} == {0: 16, 1: 16}
    assert set(bits.logits) == {(key, index) for key in (0, 1) for index in range(16)}
    assert len(set(bits.logits.values())) > 16
    assert "model.safetensors" in bits.weights and bits.numerics["device"] == "cpu"


def test_machines_that_compute_the_same_hold(bits: Bits) -> None:
    found = Comparison()
    assert found.add("a", bits).endswith("1 thread, 32 tokens: the others are compared with it")
    assert found.add("b", replace(bits)).endswith("32 tokens: equal to a to the bit")
    assert not found.failed and found.conclusion() == "all 2 machines compute the same bits"


def test_another_logit_is_found_though_all_tokens_are_equal(bits: Bits) -> None:
    found = Comparison()
    found.add("a", bits)
    line = found.add("b", replace(bits, logits={**bits.logits, (1, 3): "00"}))
    assert f"diverges from a: prompt 1, output 3: {bits.tokens[1][3]} stays, with other logits" in line
    assert found.conclusion() == "1 of 2 machines failed" and len(found.failed) == 1


def test_the_first_other_token_is_named_with_what_may_explain_it(bits: Bits) -> None:
    tokens = bits.tokens[0]
    others = {**bits.tokens, 0: (*tokens[:2], 8 + (tokens[2] == 8), *tokens[3:])}
    found = Comparison()
    found.add("a", bits)
    line = found.add("b", replace(bits, tokens=others, numerics={**bits.numerics, "kernels": "avx2"}))
    assert f"prompt 0, output 2: {tokens[2]} becomes {others[0][2]}" in line
    assert "kernels: was" in line and 'now "avx2"' in line


def test_an_answer_that_ends_early_diverges(bits: Bits) -> None:
    found = Comparison()
    found.add("a", bits)
    shorter = {**bits.tokens, 1: bits.tokens[1][:5]}
    assert "prompt 1, output 5" in found.add("b", replace(bits, tokens=shorter))


def test_a_machine_that_cannot_run_it_fails(bits: Bits) -> None:
    found = Comparison()
    assert found.add("a", ModelError("no such model: x")) == "a: cannot run it: no such model: x"
    found.add("b", bits)
    assert found.failed == ["a cannot run it: no such model: x"]
