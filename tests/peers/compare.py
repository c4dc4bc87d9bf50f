"""Compares batchgen with other engines on one machine, in turns, and makes the table of ``docs/performance.md``.

The first step needs batchgen, the second an environment for each engine, the others nothing::

    python tests/peers/compare.py prompts --model DIR --chats FILE --out work.jsonl
    python tests/peers/compare.py run --workload work.jsonl --model DIR --out raw/ --rounds 3 \\
        batchgen=.venv/bin/python transformers=.venv/bin/python openvino=ov/bin/python:EXPORTED_DIR
    python tests/peers/compare.py table raw/
    python tests/peers/compare.py chart raw/ > speed.svg

With ``--texts`` the workload has texts in ``prompt``, and each becomes a vector.

An engine is ``NAME[/DTYPE]=PYTHON[:MODEL_DIR]``. One without its Python is left out, and the table says so. Each run is
a new process and leaves one file of raw JSON: what the driver measured, the seconds of the whole command, the machine,
the time, the commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_REPOSITORY = _HERE.parents[1]
_MAX_RUN_S = 3600
Run = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """One engine in one number format, the Python of its environment, and the folder of its model."""

    name: str
    dtype: str
    python: str
    model: str

    @classmethod
    def parse(cls, text: str, model: str) -> Peer:
        """From ``NAME[/DTYPE]=PYTHON[:MODEL_DIR]``."""
        label, _, place = text.partition("=")
        name, _, dtype = label.partition("/")
        python, _, own_model = place.partition(":")
        return cls(name, dtype or "bfloat16", python, own_model or model)

    def run(self, driver: str, workload: Path, flags: list[str]) -> Run:
        """One run: the driver's object, or why there is none."""
        found: Run = {"peer": self.name, "dtype": self.dtype}
        if not Path(self.python).exists():
            return found | {"skipped": f"there is no {Path(self.python).name} at the place that was given"}
        arguments = ["--model", self.model, "--workload", str(workload), "--dtype", self.dtype, *flags]
        paths = [str(_REPOSITORY)] if self.name == "batchgen" else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        command = [self.python, str(_HERE / driver), self.name, *arguments]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=_MAX_RUN_S, check=False
            )
        except subprocess.TimeoutExpired:
            return found | {"failed": f"no end within {_MAX_RUN_S} s"}
        wall_s = time.monotonic() - start
        if done.returncode:
            return found | {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
        *_, result = (line for line in done.stdout.splitlines() if line.startswith("{"))  # some engines log behind it
        return json.loads(result) | {"wall_s": round(wall_s, 3)}  # type: ignore[no-any-return]


def make_prompts(given: argparse.Namespace) -> None:
    """Write the token ids of prompts or chats, as the model's own template and tokenizer make them."""
    sys.path.insert(0, str(_REPOSITORY))
    from batchgen.bench.workload import from_file
    from batchgen.config.load import job_from_values
    from batchgen.core.records import SamplingParams
    from batchgen.run.loader import read_model

    tokenizer = read_model(job_from_values({"model": {"path": str(given.model)}}, "prompts")).tokenizer
    requests = from_file(given.chats, SamplingParams(), limit=given.limit, tokenizer=tokenizer)
    rows = ({"prompt_token_ids": request.prompt_token_ids} for request in requests)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(given: argparse.Namespace) -> None:
    """Run all engines in turns, as often as asked for."""
    given.out.mkdir(parents=True, exist_ok=True)
    driver = "text_drivers.py" if given.texts else "drivers.py"
    flags = ["--max-num-seqs", str(given.max_num_seqs)]
    flags += (
        [] if given.texts else ["--max-tokens", str(given.max_tokens), "--ends", given.ends or end_tokens(given.model)]
    )
    flags += ["--batch", str(given.batch)]
    what = "vectors" if given.texts else f"at most {given.max_tokens} tokens of answer, lengths unknown to all"
    about = conditions(given.workload) | {"what": what}
    peers = [Peer.parse(text, str(given.model)) for text in given.peers]
    for turn in range(given.rounds * len(peers)):
        peer = peers[turn % len(peers)]
        began_at = datetime.now(UTC).isoformat(timespec="seconds")
        found = {"round": turn // len(peers), "began_at": began_at, **peer.run(driver, given.workload, flags), **about}
        path = given.out / f"{turn:03}-{peer.name}-{peer.dtype}.json"
        path.write_text(json.dumps(found, indent=2) + "\n")
        what = found.get("skipped") or found.get("failed") or f"{found['generate_s']:.1f} s"
        sys.stderr.write(f"{peer.name} {peer.dtype}, round {found['round'] + 1}: {what}\n")


def end_tokens(model: Path) -> str:
    """The end tokens that all engines are given: those of the model's own files."""
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = model / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        ends += [found] if isinstance(found, int) else found or []
    return ",".join(map(str, dict.fromkeys(ends)))


def conditions(workload: Path) -> Run:
    """What a number means nothing without."""
    commit = ["git", "-C", str(_REPOSITORY), "rev-parse", "--short", "HEAD"]
    return {
        "workload": workload.name,
        "workload_digest": hashlib.sha256(workload.read_bytes()).hexdigest()[:16],
        "processor": _processor(),
        "num_cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "system": platform.system(),
        "commit": subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def table(runs: list[Run]) -> Iterator[str]:
    """The lines of a table in Markdown, an engine per row in order of its first run, and what it was measured on."""
    by_peer: dict[tuple[str, str], list[Run]] = {}
    for found in runs:
        by_peer.setdefault((found["peer"], found["dtype"]), []).append(found)
    own: dict[int, float] = {}  # of batchgen in the format that comes first
    for found in runs:
        if found["peer"] == "batchgen" and _is_done(found):
            own.setdefault(found["round"], found["generate_s"])
    unit, name = ("rows", "vectors") if runs[0]["what"] == "vectors" else ("output_tokens", "output tokens")
    yield f"| engine | format | {name} | generation | processor time | whole command | {name}/s | time, batchgen = 1 |"
    yield "|---|---|---|---|---|---|---|---|"
    missing = []
    for (peer, dtype), tries in by_peer.items():
        done = [found for found in tries if _is_done(found)]
        if len(done) < len(tries):
            reasons = {str(found.get("skipped") or found.get("failed")) for found in tries if not _is_done(found)}
            missing.append(
                f"{peer} {dtype}: {len(tries) - len(done)} of {len(tries)} runs missing ({'; '.join(sorted(reasons))})"
            )
        if not done:
            continue
        rates = [found[unit] / found["generate_s"] for found in done]
        ratios = [found["generate_s"] / own[found["round"]] for found in done if found["round"] in own]
        columns = (
            f"{peer} {done[0]['version']}",
            dtype,
            _spread([found[unit] for found in done], ",.0f"),
            _spread([found["generate_s"] for found in done], ".1f") + " s",
            _spread([found["generate_cpu_s"] for found in done], ".1f") + " s",
            _spread([found["wall_s"] for found in done], ".1f") + " s",
            f"{statistics.median(rates):.0f}",
            _spread(ratios, ".2f") if ratios else "",
        )
        yield f"| {' | '.join(columns)} |"
    first = runs[0]
    yield ""
    num_rows, num_rounds = max(found.get("rows", 0) for found in runs), 1 + max(found["round"] for found in runs)
    yield (
        f"{first['processor']}, {first['num_cpus']} CPUs, {first['began_at'][:10]}, commit {first['commit']}. "
        f"{num_rows} rows of {first['workload']} ({first['workload_digest']}), {first['what']}, {num_rounds} "
        f"rounds in turns; load before: {first['load_before']:.1f}. Two numbers are the smallest and the largest."
    )
    yield from missing


def chart(runs: list[Run]) -> str:
    """Bars of output tokens per second of processor time, the median of each engine, as SVG, light and dark."""
    rates: dict[str, list[float]] = {}
    for found in runs:
        if _is_done(found):
            name = f"{found['peer'].replace('_', '.')} {found['dtype']}"
            rates.setdefault(name, []).append(found["output_tokens"] / found["generate_cpu_s"])
    bars = {name: statistics.median(values) for name, values in rates.items()}
    width, row, left = 640, 28, 150
    scale = (width - left - 70) / max(bars.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {row * len(bars) + 8}" role="img" '
        f'aria-label="Output tokens per second of processor time" font-family="system-ui, sans-serif" font-size="14">',
        "<style>text { fill: #16191d } rect { fill: #9aa3af } .own { fill: #2563eb } "
        "@media (prefers-color-scheme: dark) "
        "{ text { fill: #e8eaed } rect { fill: #5b6470 } .own { fill: #6ea8fe } }</style>",
    ]
    for place, (name, value) in enumerate(bars.items()):
        y, own = 4 + row * place, ' class="own"' if name.startswith("batchgen") else ""
        lines.append(f'<text x="{left - 8}" y="{y + 18}" text-anchor="end">{name}</text>')
        lines.append(f'<rect{own} x="{left}" y="{y + 3}" width="{value * scale:.1f}" height="{row - 8}" rx="3"/>')
        lines.append(f'<text x="{left + value * scale + 6:.1f}" y="{y + 18}">{value:.0f}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _is_done(found: Run) -> bool:
    return "generate_s" in found


def _spread(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def main() -> None:
    """Read the command line and do the step that it names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    steps = parser.add_subparsers(dest="step", required=True)
    step = steps.add_parser("prompts", help="token ids of prompts or chats")
    step.add_argument("--model", required=True, type=Path)
    step.add_argument("--chats", required=True, type=Path, help="JSON Lines with prompt or messages")
    step.add_argument("--limit", type=int)
    step.add_argument("--out", required=True, type=Path)
    step = steps.add_parser("run", help="all engines in turns")
    step.add_argument("peers", nargs="+", metavar="NAME[/DTYPE]=PYTHON[:MODEL_DIR]")
    step.add_argument("--model", required=True, type=Path)
    step.add_argument("--workload", required=True, type=Path)
    step.add_argument("--out", required=True, type=Path)
    step.add_argument("--texts", action="store_true", help="vectors of texts")
    step.add_argument("--rounds", type=int, default=3)
    step.add_argument("--max-tokens", type=int, default=256)
    step.add_argument("--max-num-seqs", type=int, default=256)
    step.add_argument("--batch", type=int, default=32, help="rows at once in llama.cpp, and in a batch of others")
    step.add_argument("--ends", default="", help="end tokens, such as 2 [those of the model's folder]")
    for name in ("table", "chart"):
        step = steps.add_parser(name, help=f"the {name} of the raw files of a run")
        step.add_argument("raw", type=Path)
    given = parser.parse_args()
    if given.step == "prompts":
        make_prompts(given)
    elif given.step == "run":
        run(given)
    else:
        runs = [json.loads(path.read_text()) for path in sorted(given.raw.glob("*.json"))]
        sys.stdout.write(chart(runs) if given.step == "chart" else "\n".join(table(runs)) + "\n")


if __name__ == "__main__":
    main()
