"""The facts of a report as labelled texts and tables: labels, units and omissions are decided here, once.

Texts with the same label in a group become one; ``tables`` and ``html`` lay them out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from batchgen.core.answers import text_of
from batchgen.core.logprobs import lists_of
from batchgen.core.numerics import Numerics
from batchgen.core.units import counted, format_amount, format_duration, format_share, shortened

Report = Mapping[str, Any]
Facts = Iterator[tuple[str, str]]

ACCOUNTS = {"read": "reading", "load": "loading", "mask": "masks", "sample": "sampling", "host": "between steps"}
ACCOUNTS |= {"write": "writing"}
_SHOWN_SHARE = 0.005  # of the wall time
_LONG_SHARE, _LONG_S = 0.1, 5.0  # of the wall time, and in seconds: longer work is mentioned
_NUM_CODES = 10  # error codes named in a line
_WRONG_WIDTH = 30
NUM_ANSWERS = 5
NUM_ERRORS = 20
_ANSWER_WIDTH = 400
_ID_WIDTH = 40
_NUM_WORKERS = 100  # named in a table


class Table(NamedTuple):
    """A table of texts; ``is_prose`` if all columns but the first hold sentences, not numbers.

    With ``is_folded``, a page shows it on a click.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_prose: bool = False
    is_folded: bool = False


def at(report: Report, path: str) -> Any:
    """The value at a path of keys such as ``tokens.total``; None if a key on the way is missing or null."""
    value: Any = report
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def joined(facts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Text by label, in order."""
    texts: dict[str, str] = {}
    for label, text in facts:
        texts[label] = f"{texts[label]}, {text}" if label in texts else text
    return texts


def rate(report: Report, side: str) -> float | None:
    """Tokens of computed rows per second of generating: loading, compiling, reading and writing do not count.

    ``side`` is prompt, completion or total. If nothing was generated, the rate is over the wall time.
    """
    speed: float | None = at(report, f"tokens_per_s.{side}")
    wall_s, generate_s = report.get("wall_s"), report.get("generate_s")
    return speed * wall_s / generate_s if speed and wall_s and generate_s else speed


def pace(report: Report) -> str:
    """One line: tokens (without kept rows), the time they took, their rate, and other work that took long."""
    tokens = report["tokens"]
    what, side = ("tokens out", "completion") if tokens["completion"] else ("prompt tokens", "prompt")
    wall_s, generate_s = report["wall_s"], report["generate_s"]
    without = ", without copies" if report["duplicates"] else ""
    tokens_per_s = rate(report, side)
    speed = f" ({tokens_per_s:,.0f} tok/s{without})" if tokens_per_s else ""
    others = [
        f"{ACCOUNTS.get(name, name)} {format_duration(seconds)}"
        for name, seconds in report["seconds"].items()
        if name == "load" or (name in ("read", "write") and seconds > max(_LONG_SHARE * wall_s, _LONG_S))
    ]
    num_tokens = tokens[side] - report.get("reused", {}).get(side, 0)
    took = f"{num_tokens:,} {what} in {format_duration(generate_s or wall_s)}{speed}"
    return "; ".join([took, *others]) if generate_s else took


def figures(report: Report) -> Facts:
    """The headline numbers, each with its own label."""
    rows, tokens = report["rows"], report["tokens"]
    rates = {side: rate(report, side) or 0.0 for side in ("prompt", "completion", "total")}
    yield "wall time", format_duration(report["wall_s"])
    if tokens["completion"]:
        yield "tokens/s out", f"{rates['completion']:,.0f}"
        yield "tokens/s in and out", f"{rates['total']:,.0f}"
    else:
        yield "tokens/s in", f"{rates['prompt']:,.0f}"
        if tokens["prompt"]:
            yield "rows/s", f"{rates['prompt'] / tokens['prompt'] * rows['done']:,.1f}"
    yield "rows done", f"{rows['done']:,}"
    if report["duplicates"]:
        yield "of them copies", f"{report['duplicates']:,}"
    if reused := report.get("reused"):
        yield "of them kept", f"{reused['rows']:,}"
    yield "rows failed", f"{rows['failed']:,}"
    yield "tokens in", f"{tokens['prompt']:,}"
    if tokens["completion"]:
        yield "tokens out", f"{tokens['completion']:,}"
    if (accuracy := report.get("accuracy")) and accuracy["total"]:
        yield "exact match", format_share(accuracy["correct"] / accuracy["total"], 1)
    if scored := report.get("perplexity"):
        yield "perplexity", f"{scored['value']:,.4f}"
    if structured := report.get("structured"):
        yield "structured answers", f"{structured['samples']:,}"
        yield "not complete", f"{structured['incomplete']:,}"
        yield "tokens forced", f"{structured['forced_share'] or 0:.0%}"
    if cost := _hours(report):
        yield cost


def tiles(report: Report) -> Facts:
    """The few headline numbers that a page begins with."""
    figure = dict(figures(report))
    low, high = (report.get("accuracy") or {}).get("interval") or (None, None)
    interval = "" if low is None else f", 95% interval {low:.1%} to {high:.1%}"
    judged = ("exact match", "perplexity", "not complete")
    wanted = ["rows done", "rows failed", *judged, "tokens/s out", "rows/s", "wall time"]
    wanted += [name for name in figure if "-hours" in name]
    yield from ((name + interval * (name == "exact match"), figure[name]) for name in wanted if name in figure)


def outcome(report: Report) -> Facts:
    """Duration and speed of a run, its failures, and its bound."""
    figure = dict(figures(report))
    over = f" over {report['sessions']} invocations" if report["sessions"] > 1 else ""
    yield "took", f"{figure['wall time']}{over}: {figure['rows done']} done, {figure['rows failed']} failed"
    speed = f"{figure.get('rows/s', 0)} rows/s, {figure.get('tokens/s in')} tokens/s in"
    if "tokens/s out" in figure:
        speed = f"{figure['tokens/s out']} tokens/s out, {figure['tokens/s in and out']} in and out"
    speed += ", without copies" if report["duplicates"] else ""
    yield "speed", f"{speed}, while generating" if report["generate_s"] else speed
    errors = sorted(report["errors"].items(), key=lambda item: -item[1])
    codes = ", ".join(f"{code} {count:,}" for code, count in errors[:_NUM_CODES])
    yield "failed", f"{counted(report['rows']['failed'], 'row')}: {codes}" if codes else "no row"
    if accuracy := report.get("accuracy"):
        yield "exact match", exact_match(accuracy) if accuracy["total"] else "no row was compared"
        shown = accuracy.get("wrong", ())
        if len(shown) < (num_wrong := accuracy["total"] - accuracy["correct"]):
            yield "wrong", f"the first {len(shown)} of {num_wrong:,}"
        for row in shown:
            answer = "no answer" if row["answer"] is None else shortened(row["answer"], _WRONG_WIDTH) or "no text"
            row_id, wanted = (shortened(str(row[name]), _WRONG_WIDTH) for name in ("id", "expected"))
            yield "wrong", f"{row_id}: {answer} (expected {wanted})"
    if "perplexity" in figure:
        yield "perplexity", f"{figure['perplexity']} over {counted(report['perplexity']['tokens'], 'token')} of prompts"
    if "structured" in report:
        lacking = f"{figure['not complete']} not complete" if report["structured"]["incomplete"] else "all complete"
        answers = counted(report["structured"]["samples"], "answer")
        yield "structured", f"{answers}, {lacking}, {figure['tokens forced']} of tokens forced"
    if report.get("workers"):
        yield from _workers(report["workers"])
    yield "bound by", report["bound_by"]


def exact_match(accuracy: Mapping[str, Any]) -> str:
    """The share of compared rows that are right, and its interval."""
    low, high = accuracy.get("interval") or (None, None)
    interval = f"; 95% interval {low:.1%} to {high:.1%}" if low is not None else ""
    correct, total = accuracy["correct"], accuracy["total"]
    share = f"{format_share(correct / total, 2)} ({correct:,} of {total:,}{interval})"
    return ", ".join([share, *samples_text(accuracy)])


def samples_text(accuracy: Mapping[str, Any]) -> Iterator[str]:
    """For rows with several samples: which sample the share counts, and the shares of all, majority and best."""
    if samples := accuracy.get("samples"):
        yield "of the first sample"
        yield f"mean of all {samples['mean']:.2%}"
        yield f"majority {samples['majority']:.2%}"
        yield f"best of {samples['n']} {samples['best']:.2%}"


def _workers(workers: Sequence[Mapping[str, Any]]) -> Facts:
    hours, losses = (sum(worker[name] for worker in workers) for name in ("worker_hours", "losses"))
    busy = sum(worker["busy_share"] * worker["worker_hours"] for worker in workers) / (hours or 1.0)
    hosts = counted(len({worker["place"] for worker in workers}), "machine")
    yield "workers", f"{len(workers):,} on {hosts}, there for {format_duration(3600 * hours)} in all, {busy:.0%} busy"
    rows, tokens = (sum(worker[name] for worker in workers) for name in ("rows_given_again", "tokens_taken_over"))
    if losses:
        yield "workers", f"{losses:,} lost"
    if rows:
        yield "workers", f"{counted(rows, 'row')} given to others with {tokens:,} tokens"


def workers(report: Report) -> Table:
    """Work of each worker, the most productive first."""
    head = ("worker", "place", "rows", "tokens out", "busy", "hours", "losses", "rows given again", "tokens taken over")
    busiest = sorted(report.get("workers", ()), key=lambda worker: -worker["tokens"])
    rows = [
        (
            *(shortened(worker[name], _ID_WIDTH) for name in ("name", "place")),
            *(f"{worker[name]:,}" for name in ("rows", "tokens")),
            f"{worker['busy_share']:.0%}",
            f"{worker['worker_hours']:,.3f}",
            *(f"{worker[name]:,}" for name in ("losses", "rows_given_again", "tokens_taken_over")),
        )
        for worker in busiest[:_NUM_WORKERS]
    ]
    title = "Workers" if len(rows) == len(busiest) else f"Workers: {len(rows)} of {len(busiest):,}"
    return Table(title, head, rows)


def details(report: Report) -> Table:
    """The work that a run did or avoided, and the resources it took."""
    return Table("Work and machine", (), [*joined([*_work(report), *_resources(report)]).items()], is_prose=True)


def _work(report: Report) -> Facts:
    tokens, cache, occupancy = report["tokens"], report["prefix_cache"], report["occupancy"]
    wall_s = report["wall_s"] or 1.0
    yield "tokens", f"{tokens['prompt']:,} in ({tokens['cached']:,} cached), {tokens['completion']:,} out"
    yield "tokens", f"{report['computed_tokens']:,} computed"
    if cache and cache["hit"]:
        yield "spared", f"{cache['hit_rate']:.0%} of the prompt tokens of sequences by the prefix cache"
    if report["duplicates"]:
        copied = f"{report['copied_tokens']['prompt']:,} tokens in, {report['copied_tokens']['completion']:,} out"
        yield "spared", f"{counted(report['duplicates'], 'row')} like another one, copied ({copied})"
    if reused := report.get("reused"):
        tokens_of = f"{reused['prompt']:,} tokens in, {reused['completion']:,} out"
        yield "spared", f"{counted(reused['rows'], 'row')} kept from earlier results ({tokens_of})"
    yield from (("finished by", f"{reason} {count:,}") for reason, count in report["finish_reasons"].items())
    for account, seconds in sorted(report["seconds"].items(), key=lambda item: -item[1]):
        if seconds >= _SHOWN_SHARE * wall_s:
            yield "time went to", f"{ACCOUNTS.get(account, account)} {seconds / wall_s:.0%}"
    if occupancy:
        yield "mean step", f"{occupancy['sequences']:,.1f} of {occupancy['max_num_seqs']:,} sequences"
        yield "mean step", f"{occupancy['tokens_per_step']:,.1f} of {occupancy['max_num_batched_tokens']:,} tokens"
        yield "mean step", f"KV {occupancy['kv_use']:.0%} used, {occupancy['max_kv_use']:.0%} at most"
    if report["preemptions"]:
        yield "preempted", f"{report['preemptions']:,} times ({report['recomputed_tokens']:,} tokens recomputed)"


def _resources(report: Report) -> Facts:
    sizes, tail_s = report["sizes"], report["tail_s"] or 0.0
    driver, each = ("driver ", " of each worker") if report.get("workers") else ("", "")
    if tail_s > _SHOWN_SHARE * report["wall_s"]:
        share = f"{tail_s / report['wall_s']:.0%}"
        yield "tail", f"{format_duration(tail_s)} at the end with less than half of the sequences ({share})"
    if report["max_rss_bytes"]:
        yield "memory", f"{driver}{report['max_rss_bytes'] / 2**20:,.0f} MiB at most"
    if sizes:
        used = f", {occupancy['max_kv_use']:.0%} of it used at most" if (occupancy := report["occupancy"]) else ""
        limit = f"{sizes['kv_bytes'] / 2**20:,.0f} MiB{each} in blocks of {sizes['block_size']} tokens"
        yield "memory", f"KV limit {limit}{used}"
    if sizes and sizes.get("max_device_bytes"):
        yield "memory", f"{sizes['max_device_bytes'] / 2**20:,.0f} MiB of the GPU at most"
    if "cost" in report:
        for name, amount in report["cost"].items():
            yield "cost", "-" if amount is None else f"{format_amount(amount)} {name.replace('_', ' ')}"
    if cost := _hours(report):
        load_share = report["seconds"].get("load", 0.0) / (report["wall_s"] or 1.0)
        loading = f", {load_share:.0%} of it for loading" if load_share > _LONG_SHARE else ""
        yield "cost", f"{cost[1]} {cost[0]}" + (", without copies" if report["duplicates"] else "") + loading
    if report["machine"]["processor"]:
        yield "ran on", report["machine"]["processor"]
    if report["threads"]:
        yield "ran on", counted(report["threads"], "thread") + each
    if report["numerics"]:
        yield "ran on", str(Numerics.of(report["numerics"]))
    if sizes:
        yield "ran on", f"{sizes['kernels']} kernels"
    if "adapter" in report:
        yield "adapter", report["adapter"]
    yield "platform", f"{report['machine']['platform']}, Python {report['machine']['python']}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())


def answers(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]], expected: Callable[..., Any] | None) -> Table:
    """The beginnings of prompts and answers of records, and the expected answers. Unknown prompts are ""."""
    has_prompts = any(prompt for prompt, _ in rows)
    table_rows = []
    for prompt, record in rows:
        cells = [shortened(str(record["id"]), _ID_WIDTH)] + ([_cut(prompt)] if has_prompts else [])
        wanted = [] if expected is None else [_cut(text_of(expected(record)))]
        table_rows.append((*cells, _cut(_answer(record)), *wanted))
    head = ["id", *(["prompt"] if has_prompts else []), "answer", *([] if expected is None else ["expected"])]
    return Table(title, head, table_rows, is_prose=True)


def changes(rows: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> Table:
    """The beginning of each prompt, and of its answer in the earlier run and now."""
    cells = [
        (shortened(str(now["id"]), _ID_WIDTH), _cut(prompt), _cut(_answer(before)), _cut(_answer(now)))
        for prompt, now, before in rows
    ]
    return Table("Answers that changed", ("id", "prompt", "before", "now"), cells, is_prose=True)


def failed(errors: Sequence[Mapping[str, Any]]) -> Table:
    """Rows that could not run, each with its place, the reason and its beginning; from ``errors.jsonl``."""
    rows = [
        (
            shortened(str(error["id"]), _ID_WIDTH),
            f"{str(error['source']).rpartition('/')[2]}:{error['line']}",
            f"{error['code']}: {_cut(error['message'])}",
            _cut(error["row"] if isinstance(error["row"], str) else json.dumps(error["row"], ensure_ascii=False)),
        )
        for error in errors
    ]
    return Table("Rows that failed", ("id", "line", "why", "row"), rows, is_prose=True)


def _cut(text: str) -> str:
    return shortened(text, _ANSWER_WIDTH)


def _answer(record: Mapping[str, Any]) -> str:
    """The answer of a record as one text; for vectors only their size."""
    for name in ("embedding", "embeddings"):
        if name in record and "finish_reason" not in record:
            return f"{name[:9]} of {len(lists_of(record[name])):,} {'numbers' if name == 'embedding' else 'tokens'}"
    if "score" in record and "finish_reason" not in record:
        return f"{record.get('label', '')} ({record['score']:.1%})".strip()
    return str(record.get("text") if record.get("text") is not None else record.get("token_ids"))


def _hours(report: Report) -> tuple[str, str] | None:
    """Device hours per million output tokens or, for a job that does not generate, prompt tokens, with a label."""
    tokens = "output" if report["tokens"]["completion"] else "prompt"
    figure = report[f"device_hours_per_million_{tokens}_tokens"]
    label = f"{figure['unit'].upper()}-hours per million {tokens} tokens"
    return None if figure["hours"] is None else (label, f"{figure['hours']:,.2f}")
