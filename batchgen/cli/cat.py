"""The ``cat`` command."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from batchgen.cli.console import show
from batchgen.cli.options import PATH
from batchgen.core.errors import ExitCode, UsageError
from batchgen.core.keys import resembling

_BUFFER_BYTES = 1 << 16


@click.command()
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--format", "form", type=click.Choice(["csv", "jsonl"]), help="[csv of a run that wrote CSV, else jsonl]."
)
@click.option("--columns", metavar="A,B", help="Fields, or the CSV's columns, to print in this order [all].")
def cat(folder: Path, form: str | None, columns: str | None) -> int:
    """Print the outputs of a finished run, whatever their format.

    \b
    Examples:
      batchgen cat runs/questions | jq .text
      batchgen cat runs/questions --format csv --columns id,text > answers.csv
    """
    from batchgen.config.record_fields import packed_keys
    from batchgen.core.json_line import encode_json
    from batchgen.core.logprobs import unpacked
    from batchgen.output.finalize import Rows, csv_format, read_records
    from batchgen.output.formats import write_lines
    from batchgen.output.rundir import RunDir

    run_dir = RunDir(folder)
    manifest = run_dir.read_manifest()
    if manifest is None:
        began = "the run is not finished: see batchgen status" if run_dir.is_begun() else "not a run directory"
        raise UsageError(f"no outputs in {folder} ({began})")
    spec = manifest.spec(run_dir.manifest)
    names = [name.strip() for name in (columns or "").split(",") if name.strip()]
    packed = packed_keys(spec)
    form = form or ("csv" if spec.output.format == "csv" else "jsonl")
    if names:
        _check(names, {name for _, record in read_records(run_dir, spec) for name in record})

    def rows() -> Iterator[tuple[int, bytes]]:
        for index, record in read_records(run_dir, spec):
            yield index, encode_json(unpacked(record if form == "csv" else _chosen(record, names), packed))

    with io.BufferedWriter(_Stdout(), _BUFFER_BYTES) as file:
        if form == "csv":
            csv_format(spec, manifest, names).write(file, Rows(rows))
        else:
            write_lines(file, Rows(rows))
    return ExitCode.OK


def _check(names: list[str], fields: set[str]) -> None:
    for name in names:
        if name not in fields:
            hint = resembling(name, sorted(fields)) or f" (known: {', '.join(sorted(fields))})"
            raise UsageError(f"--columns: no record has a field {name!r}{hint}")


def _chosen(record: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: record[name] for name in names if name in record} if names else record


class _Stdout(io.RawIOBase):
    """Standard output as a file of complete lines; control characters are escaped on a terminal."""

    def __init__(self) -> None:
        self._begun = b""  # the unfinished line that the next bytes continue

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if sys.stdout.isatty():
            *lines, self._begun = (self._begun + bytes(data)).split(b"\n")
            for line in lines:
                show(line.decode(errors="replace").removesuffix("\r"))
        else:
            click.echo(bytes(data), nl=False)
        return len(data)
