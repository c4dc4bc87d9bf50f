"""The report as one self-contained HTML file: no script, font or request. If installed, matplotlib draws SVG charts.

Its content security policy forbids all loading, and every text is escaped, since ids and paths are untrusted.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from batchgen.core.storage import check_replaceable, write_atomic
from batchgen.report.facts import ACCOUNTS, Report, Table, tiles
from batchgen.report.tables import tables
from batchgen.report.usage import thin

_NO_CHARTS = "the page has no charts: they need matplotlib (pip install matplotlib)"
_BAD = ("rows failed", "not complete")  # figures that are bad where they are not 0
# Placeholder colours: matplotlib writes them and ``_picture`` replaces each by a CSS variable of the page.
_PREFILL, _DECODE, _TEXT, _GRID, _MEMORY = "#0a0001", "#0a0002", "#0a0003", "#0a0004", "#0a0005"
_VARIABLES = {_PREFILL: "var(--prefill)", _DECODE: "var(--decode)", _TEXT: "var(--muted)", _GRID: "var(--line)"}
_VARIABLES |= {_MEMORY: "var(--memory)"}
_STYLE: Any = {  # matplotlib types its keys as one huge literal
    "svg.fonttype": "none",  # text stays text: the page's font, small, can be searched
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _TEXT),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), _GRID),
}
_LENGTHS = {"completion_tokens": "Tokens per answer", "prompt_tokens": "Tokens per prompt"}
_TIMES = {"ttft_s": "Time to first token", "tpot_s": "Time per further token", "total_s": "Total time of a row"}
_POINTS = 150  # of a series over time: more is noise at this size
_MIN_GAP = 0.01  # share of the whole time: shorter gaps are not drawn
_MIN_TICKS = 3
_SIZE = (5.0, 2.5)  # inches: small enough to be read at the width of a phone


def write_html(report: Report, path: Path, folder: str, rows: Sequence[Table]) -> str:
    """Write the page of the run in ``folder``, with tables of its ``rows``. Returns what is missing in it, or "".

    Raises UsageError if ``path`` is a file of another kind, StorageError if it cannot be written.
    """
    check_replaceable(path, b"<title>batchgen report:", "a report page")
    write_atomic(
        path, render_html(report, folder, rows).encode(), "give the command again, or write the page elsewhere"
    )
    return "" if has_matplotlib() else _NO_CHARTS


def render_html(report: Report, folder: str, rows: Sequence[Table]) -> str:
    """The page as text; ``report`` is the content of ``report.json``. Without matplotlib the charts are left out."""
    source = files("batchgen.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    finished_at = datetime.fromisoformat(report["finished_at"]).astimezone(UTC)
    pictures = [(title, Markup(svg), is_folded) for title, svg, is_folded in draw(report)]
    return environment.from_string(source).render(
        name=Path(folder).name,
        model=report["model"],
        subtitle=f"{folder} · {', '.join(report['input'])} · finished {finished_at:%Y-%m-%d %H:%M} UTC",
        tiles=[(label, text, label in _BAD and text != "0") for label, text in tiles(report)],
        note="" if has_matplotlib() else _NO_CHARTS,
        bound_by=report["bound_by"],
        advice=report["advice"],
        pictures=[(title, svg) for title, svg, is_folded in pictures if not is_folded],
        folded_pictures=[(title, svg) for title, svg, is_folded in pictures if is_folded],
        tables=[table for table in (*rows, *tables(report)) if table.rows],
    )


def has_matplotlib() -> bool:
    """Whether charts can be drawn."""
    return find_spec("matplotlib") is not None


def draw(report: Report) -> list[tuple[str, str, bool]]:
    """Title, SVG, and whether it is folded, for each chart with numbers in the report; none without matplotlib."""
    if not has_matplotlib():
        return []
    pictures: list[tuple[str, str, bool]] = []

    def add(title: str, plot: Callable[[Any, Report], None], is_folded: bool = False) -> None:
        pictures.append((title, _picture(title, plot, report), is_folded))

    if report["series"].get("at_s"):
        add("Tokens per second", _throughput)
    if len(report["finish_reasons"]) > 1:
        add("How answers ended", _reasons)
    for key, title in {**_LENGTHS, **_TIMES}.items():
        if len(report["histograms"][key]["counts"]) > 1:  # a single value does not need a chart
            add(title, partial(_histogram, key=key), key in _TIMES)
    if report["wall_s"]:
        add("Where the time went", _seconds)
    if report["series"].get("at_s") and report["occupancy"]:
        add("How full the batch was", _occupancy, True)
    return pictures


def _picture(title: str, plot: Callable[[Any, Report], None], report: Report) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "svg.hashsalt": title}):  # ids differ between pictures and not between runs
        figure = Figure(figsize=_SIZE, layout="constrained")
        plot(figure.subplots(), report)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = f'<svg role="img" aria-label="{title}"{svg[svg.index("<svg") + 4 :]}'
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def _series(report: Report) -> dict[str, Any]:
    """The report's series at a size to draw, from its first step on, with a point of no steps between invocations."""
    series = {name: [*column] for name, column in thin(report["series"], _POINTS).items()}
    series["at_s"] = [at - series["at_s"][0] for at in series["at_s"]]
    ends = [at + span for at, span in zip(series["at_s"], series["span_s"], strict=True)]
    for i in range(len(ends) - 1, 0, -1):
        gap = series["at_s"][i] - ends[i - 1]
        if gap > _MIN_GAP * ends[-1]:
            for name, column in series.items():
                column.insert(i, {"at_s": ends[i - 1], "span_s": gap}.get(name, 0))
    return series


def _throughput(axes: Any, report: Report) -> None:
    """Two areas on top of each other: prompt tokens and generated tokens, per second of each point's span."""
    series = _series(report)
    edges, unit = _steps(series, "tokens")
    tokens, prefill = series["tokens"], series["prefill_tokens"]
    spans = [max(span, 1e-9) for span in series["span_s"]]
    below = [p / s for p, s in zip(prefill, spans, strict=True)]
    whole = [t / s for t, s in zip(tokens, spans, strict=True)]
    axes.stairs(below, edges, fill=True, color=_PREFILL, label="prompts")
    axes.stairs(whole, edges, baseline=below, fill=True, color=_DECODE, label="generated")
    axes.set_ylim(0, _upper(whole))
    _finish(axes, unit, "tokens/s")


def _occupancy(axes: Any, report: Report) -> None:
    series = _series(report)
    edges, unit = _steps(series, "sequences")
    limit, max_tokens = (report["occupancy"][f"max_num_{name}"] or 1 for name in ("seqs", "batched_tokens"))
    counts = zip(series["tokens"], series["steps"], strict=True)  # a second in which workers wait is without a step
    tokens = [100 * count / max(steps, 1) / max_tokens for count, steps in counts]
    axes.stairs(tokens, edges, baseline=None, color=_PREFILL, label="tokens of a step")
    axes.stairs([100 * n / limit for n in series["sequences"]], edges, baseline=None, color=_DECODE, label="sequences")
    axes.stairs([100 * use for use in series["kv_use"]], edges, baseline=None, color=_MEMORY, label="KV memory")
    axes.set_ylim(0, 105)
    _finish(axes, unit, "% of the limit")


def _seconds(axes: Any, report: Report) -> None:
    spent = {name: s for name, s in report["seconds"].items() if s > 0.001 * report["wall_s"]}
    unit, unit_s = _time_unit(report["wall_s"])
    _bars(axes, {ACCOUNTS.get(name, name): s / unit_s for name, s in spent.items()}, unit)


def _reasons(axes: Any, report: Report) -> None:
    _bars(axes, report["finish_reasons"], "answers")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _bars(axes: Any, values: Mapping[str, float], label: str) -> None:
    """Draw a bar for each name, the longest on top."""
    names = sorted(values, key=lambda name: values[name])
    axes.barh(names, [values[name] for name in names], color=_DECODE)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)


def _histogram(axes: Any, report: Report, key: str) -> None:
    counts, edges = report["histograms"][key]["counts"], report["histograms"][key]["edges"]
    unit, unit_s = _time_unit(edges[-1]) if key.endswith("_s") else ("tokens", 1.0)
    edges = [edge / unit_s for edge in edges]
    axes.stairs(counts, edges, fill=True, color=_DECODE)
    axes.set_xscale("log")
    axes.set_xticks(_ticks(edges), minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}" if value < 1e4 else f"{value:,.0f}")
    axes.minorticks_off()
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(f"{unit}, logarithmic")
    axes.set_ylabel("rows")


def _ticks(edges: list[float]) -> list[float]:
    """Round values on a logarithmic axis between the outermost edges: few, but at least three."""
    from matplotlib.ticker import MaxNLocator

    low, high = edges[0], edges[-1]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [float(f"{factor}e{decade}") for decade in decades for factor in factors]
        if len(inside := [tick for tick in ticks if low <= tick <= high]) >= _MIN_TICKS:
            return inside
    return [float(tick) for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]


def _steps(series: Mapping[str, list[float]], column: str) -> tuple[list[float], str]:
    """The instants between points (one more than there are points) and their unit."""
    starts = series["at_s"][: len(series[column])]
    edges = [*starts, starts[-1] + max(series["span_s"][-1], 1e-6)]
    unit, unit_s = _time_unit(edges[-1])
    return [edge / unit_s for edge in edges], unit


def _time_unit(longest_s: float) -> tuple[str, float]:
    """A readable unit for times of up to ``longest_s``, and its seconds."""
    units = (("milliseconds", 1e-3, 1.0), ("seconds", 1.0, 300.0), ("minutes", 60.0, 18_000.0))
    return next(((name, unit_s) for name, unit_s, max_s in units if longest_s < max_s), ("hours", 3600.0))


def _upper(values: list[float]) -> float:
    """An axis limit that ignores the highest 2 % of values: very short steps have extreme rates."""
    ordered = sorted(values)
    return 1.15 * max(ordered[int(0.98 * (len(ordered) - 1))], 1e-9)


def _finish(axes: Any, x: str, y: str) -> None:
    axes.margins(x=0)
    axes.set_xlabel(f"{x} since the first step")
    axes.set_ylabel(y)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
