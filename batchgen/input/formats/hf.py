"""Datasets read with the ``datasets`` library: from the Hugging Face Hub, streamed, or from a folder on disk.

Only data files are read, never code. The library is imported when first needed, since that takes a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pyarrow as pa

from batchgen.config.job import InputSpec
from batchgen.core.addresses import masked
from batchgen.core.errors import BatchgenError, InputError, UsageError
from batchgen.core.file_digests import Digests
from batchgen.core.records import Cursor
from batchgen.core.units import one_line
from batchgen.input.formats import Rows, Wanted
from batchgen.input.formats.arrow import TableFile, pieces

PREFIX = "hf:"
_OPTIONS = frozenset({"config", "split", "revision"})
_BATCH_ROWS = 256
# The splits of an opened dataset, the data files of each where known, and the library's own digest of them.
_Opened = tuple[Mapping[str, Any], Mapping[str, tuple[str, ...]], str]


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` made this folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


class DatasetFile(TableFile):
    """One split of a dataset; ``text`` is ``hf:NAME?config=...&split=...&revision=...`` or a folder.

    Raises UsageError if it cannot be opened, BatchgenError if the connection fails while rows are read, InputError if
    data files disagree on a column's type.
    """

    def __init__(self, text: str, spec: InputSpec) -> None:
        self._name, self._spec = text, spec
        name, options = _parse_name(text)
        folder = Path(name)
        if not folder.is_absolute() and folder.is_dir():
            what = f"the working directory holds a folder {name!r}, which would be read instead of the Hub's dataset"
            raise UsageError(
                f"cannot open {text}: {what}; start elsewhere, or write hf:./{name} in a flag if it is meant"
            )
        self.path = folder if folder.is_dir() else None
        try:
            self._is_saved = is_saved_dataset(folder)
            splits, files, self._fallback_digest = (
                _open_saved(folder) if self._is_saved else _open_builder(name, options)
            )
        except Exception as error:  # datasets raises a dozen unrelated types, its dependencies' among them
            advice = "; check the network, or name a copy on this machine" if isinstance(error, ConnectionError) else ""
            raise UsageError(f"cannot open {text}: {one_line(error)}{advice}") from error
        self._split = _choose_split(text, options.get("split"), list(splits))
        self._dataset = splits[self._split].with_format("arrow")
        self._length: int | None = getattr(self._dataset, "num_rows", None)  # None if it is streamed
        self._files = files.get(self._split, ())
        self.local_files = tuple(path for path in map(Path, self._files) if path.is_file())

    def read(self, at: Cursor, stop: int | None, wanted: Wanted | None) -> Rows:
        return (yield from self._read_batches(self._batches(at.row), at, stop, wanted))

    def _batches(self, first: int) -> Iterator[pa.RecordBatch]:
        if first == self._length:
            return  # datasets refuses to skip all rows there are
        try:
            if self._is_saved:
                yield from _stored_batches(self._files, first)
            else:
                for table in self._dataset.skip(first).iter(batch_size=_BATCH_ROWS):
                    yield from chain.from_iterable(map(pieces, table.to_batches()))
        except Exception as error:  # as above
            what = f"cannot read on in {self._name}: {one_line(error)}"
            if _is_of_a_value(error):
                why = "all files of a dataset must agree on the types of columns"
                raise InputError(f"{what}; {why}: name its files in input.path to read each as it is") from error
            raise BatchgenError(f"{what}; run the same command again") from error

    def num_rows(self) -> int | None:
        """The length of a saved dataset; for others the number in the Hub's description, or None."""
        if self._length is not None:
            return self._length
        splits = self._dataset.info.splits or {}
        return int(splits[self._split].num_examples) if self._split in splits else None

    def num_bytes(self) -> int | None:
        is_local = len(self.local_files) == len(self._files) > 0
        return sum(path.stat().st_size for path in self.local_files) if is_local else None

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        """Name, split and a digest of local contents, or of Hub addresses, which name the commit."""
        digest = hashlib.sha256(b"" if self._files else self._fallback_digest.encode())
        local = frozenset(self.local_files)
        for name in self._files:
            path = Path(name)
            digest.update((digests.digest(path) if path in local else name).encode())
        return {"path": self._name, "split": self._split, "sha256": digest.hexdigest()}


def _is_of_a_value(error: BaseException | None) -> bool:
    """Whether an error, which datasets wraps in its own, comes from a file's values, not from reaching the file."""
    causes = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    is_of_reading = any(isinstance(item, OSError) for item in causes)
    return not is_of_reading and any(isinstance(item, ValueError | TypeError | pa.ArrowException) for item in causes)


def _parse_name(text: str) -> tuple[str, dict[str, str]]:
    name, _, query = text.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not name or options.keys() - _OPTIONS or masked(text) != text:
        raise UsageError(f"cannot read {text!r}; write hf:NAME?config=...&split=...&revision=... (all optional)")
    return name, options


def _open_saved(folder: Path) -> _Opened:
    import datasets

    opened = datasets.load_from_disk(str(folder))
    splits = opened if isinstance(opened, datasets.DatasetDict) else {"": opened}
    return splits, {name: tuple(item["filename"] for item in splits[name].cache_files) for name in splits}, ""


def _stored_batches(files: Iterable[str], first: int) -> Iterator[pa.RecordBatch]:
    """The rows of a saved split from ``first`` on, not memory-mapped: if a mapped file shrinks, the process dies."""
    for name in files:
        with pa.OSFile(name) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                yield from pieces(batch, first)
                first = max(0, first - batch.num_rows)


def _open_builder(name: str, options: Mapping[str, str]) -> _Opened:
    import datasets

    builder = datasets.load_dataset_builder(name, options.get("config"), revision=options.get("revision"))
    data_files = getattr(builder.config, "data_files", None) or {}
    files = {str(split): tuple(map(str, names)) for split, names in data_files.items()}
    splits = {str(name): split for name, split in builder.as_streaming_dataset().items()}
    return splits, files, str(builder.hash)


def _choose_split(text: str, wanted: str | None, splits: list[str]) -> str:
    if wanted is None and len(splits) == 1:
        return splits[0]
    if wanted in splits:
        return str(wanted)
    example = f"{text.partition('?')[0]}?split={splits[0]}" if splits else text
    if not example.startswith(PREFIX):
        example = PREFIX + example
    problem = "has several splits" if wanted is None else f"has no split {wanted!r}"
    raise UsageError(f"{text} {problem}: choose one of {', '.join(splits) or '(none)'}, as in {example!r}")
