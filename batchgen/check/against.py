"""Compares two forms of a model on the user's own rows, such as int8 weights with the weights as they are stored.

The baseline, in a dtype and with no integers, answers every row greedily; so does the other form. Both then say how
likely they find the same texts: given answers, or the baseline's. Only one form is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import exp, fsum
from typing import Any

from batchgen.check.proofs import Write, read_rows
from batchgen.config.job import JobSpec, ModelSpec
from batchgen.core.errors import GateFailed, TokenizerError, UsageError
from batchgen.core.records import Request, Result, SamplingParams
from batchgen.core.units import counted
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.load import load_weights
from batchgen.engine.sizes import use_threads
from batchgen.report.facts import numerics_text
from batchgen.run.loader import ModelInfo, read_model

Tokens = tuple[int, ...]

_SCORED = SamplingParams(choices=("the text",))
_MOST_LOSS = 700.0  # per token; beyond it a perplexity is no float
_SHOWN_ROWS = 100  # that differ, by index


@dataclass(frozen=True, slots=True)
class _Answers:
    """What one form gives for every row: ``tokens`` and, of the texts to score, the sum of ``logprobs``, by key."""

    form: str
    tokens: Mapping[int, Tokens]
    logprobs: Mapping[int, float]

    def perplexity(self, num_tokens: int) -> float:
        return exp(min(-fsum(self.logprobs.values()) / num_tokens, _MOST_LOSS))


def compare_forms(spec: JobSpec, dtype: str, max_tokens: int, *, log: Write) -> dict[str, Any]:
    """Compare the model of ``spec`` with itself in ``dtype`` and with no integers, on the rows of its input.

    ``log`` takes messages about progress. Returns the result as plain data; ``render`` makes it text.

    Raises:
        UsageError: model or input cannot be used.
        GateFailed: a row ends with an error.
    """
    info = read_model(spec)
    params = SamplingParams(max_tokens=max_tokens)
    rows = read_rows(spec, info, params)
    requests = [replace(request, params=params, choices=()) for _, request in rows]  # a row may ask for others
    column = spec.output.expected
    expected = {request.key: _text(row.columns.get(column)) for row, request in rows} if column else {}
    texts = _encoded(expected, info) if column else {}
    use_threads(spec.engine.threads, info.config)
    plain = replace(spec.model, dtype=dtype, weights="auto", activations="auto")
    log(f"running {counted(len(requests), 'row')} with the baseline")
    baseline = _answers(plain, EngineConfig(), requests, texts, info)
    texts = texts or dict(baseline.tokens)
    log("running them with the other form")
    other = _answers(spec.model, spec.engine, requests, texts, info)
    found = {**spec.model.named, "scored": column, **_compared(requests, baseline, other, texts)}
    if column:
        found["exact_match"] = [_num_right(expected, answers.tokens, info) for answers in (baseline, other)]
    return found


def _answers(
    where: ModelSpec, config: EngineConfig, requests: Sequence[Request], texts: Mapping[int, Tokens], info: ModelInfo
) -> _Answers:
    """Run and score all rows on a form of the model; without ``texts`` its own answers are scored."""
    model = load_weights(where)
    engine = Engine(model, config, eos_token_ids=info.eos_token_ids)
    tokens = {result.key: result.token_ids for result in _checked(engine.run(requests))}
    texts = texts or tokens
    scored = [replace(request, params=_SCORED, choices=(texts[request.key],)) for request in requests]
    logprobs = {result.key: result.choice_logprobs[0] for result in _checked(engine.run(scored))}
    named = {name: value for name, value in engine.numerics.items() if name != "kernels"}
    return _Answers(numerics_text(named), tokens, logprobs)


def _checked(results: Iterator[Result]) -> Iterator[Result]:
    for result in results:
        if result.error is not None:
            raise GateFailed(f"row {result.key} cannot be run: {result.error.message}")
        yield result


def _compared(
    requests: Sequence[Request], baseline: _Answers, other: _Answers, texts: Mapping[int, Tokens]
) -> dict[str, Any]:
    different = [request.key for request in requests if baseline.tokens[request.key] != other.tokens[request.key]]
    pairs = [(baseline.tokens[request.key], other.tokens[request.key]) for request in requests]
    num_tokens = sum(len(wanted) for wanted, _ in pairs)
    agreeing = sum(_num_agreeing(wanted, got) for wanted, got in pairs)
    num_scored = sum(map(len, texts.values()))
    perplexities = [answers.perplexity(num_scored) for answers in (baseline, other)]
    return {
        "forms": [baseline.form, other.form],
        "num_rows": len(requests),
        "num_same_rows": len(requests) - len(different),
        "different_rows": different[:_SHOWN_ROWS],
        "num_tokens": num_tokens,
        "agreeing_share": round(agreeing / num_tokens, 6),
        "num_scored_tokens": num_scored,
        "perplexity": [round(value, 6) for value in perplexities],
        "perplexity_ratio": round(perplexities[1] / perplexities[0], 6),
    }


def _num_agreeing(wanted: Tokens, got: Tokens) -> int:
    """Tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(wanted, got, strict=False)))


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _encoded(texts: Mapping[int, str], info: ModelInfo) -> dict[int, Tokens]:
    """The tokens of each row's expected text. Raises UsageError where there are none."""
    if info.tokenizer is None:
        raise UsageError("--expected needs a tokenizer, and this model has none")
    found = {}
    for key, tokens in zip(texts, info.tokenizer.encode_batch([*texts.values()], False), strict=True):
        if isinstance(tokens, TokenizerError) or not tokens:
            raise UsageError(f"--expected: row {key} has no text that could be scored")
        found[key] = tuple(tokens)
    return found


def _num_right(expected: Mapping[int, str], tokens: Mapping[int, Tokens], info: ModelInfo) -> int:
    """Rows whose text is the expected one, compared as in a run's report."""
    assert info.tokenizer is not None
    return sum(info.tokenizer.decode(tokens[key]).strip() == text.strip() for key, text in expected.items())


def render(found: Mapping[str, Any]) -> str:
    """The result as text for a person."""
    rows, same = found["num_rows"], found["num_same_rows"]
    (was, now), text = found["perplexity"], "the baseline's answers"
    if found["scored"] is not None:
        text = f"column {found['scored']!r}"
    lines = [
        found["model"],
        f"  baseline     {found['forms'][0]}",
        f"  other form   {found['forms'][1]}",
        f"  same tokens  {same:,} of {counted(rows, 'row')} ({same / rows:.1%})",
        f"  agreement    {found['agreeing_share']:.2%} of {found['num_tokens']:,} tokens, to a row's first difference",
        f"  perplexity   {was:.4f} and {now:.4f}, {found['perplexity_ratio'] - 1:+.2%}, of {text}",
    ]
    if "exact_match" in found:
        lines.append("  exact match  {:,} and {:,} of {:,} rows".format(*found["exact_match"], rows))
    elif same < rows:
        lines.append("  Another answer need not be a worse one: --expected COLUMN counts right ones.")
    return "\n".join(lines)
