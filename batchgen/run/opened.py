"""A job with its model and its rows, as a run, a plan, a trial and a check open it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property

from batchgen.config.job import JobSpec
from batchgen.config.record_fields import kept_columns
from batchgen.core.file_digests import Digests
from batchgen.core.units import WHOLE, Shard, shown
from batchgen.input.columns import check_columns
from batchgen.input.ids import RowValidator, UniqueIds, may_have_ids
from batchgen.input.requests import RequestBuilder
from batchgen.input.source import RowRange, Source, open_source
from batchgen.output.record_builder import RecordBuilder
from batchgen.output.rundir import RunDir
from batchgen.run.loader import ModelInfo, read_model
from batchgen.run.stdin import stdin_as_file


@dataclass
class OpenJob:
    """A job with its ``spec`` resolved, its ``model``, the ``source`` of its rows, and the digests of their files.

    A run opens its source again once standard input has been copied to the run directory.
    """

    spec: JobSpec
    model: ModelInfo
    source: Source
    digests: Digests = field(default_factory=Digests)

    @cached_property
    def builder(self) -> RequestBuilder:
        """The builder of requests. Raises UsageError if [input] does not fit the model."""
        return self.model.builder(self.spec)

    @cached_property
    def records(self) -> RecordBuilder:
        return self.model.record_builder(self.spec)

    def rows(self, shard: Shard = WHOLE) -> RowRange:
        return RowRange(self.source, shard, has_ids=may_have_ids(self.spec.input))

    def check_columns(self) -> list[str]:
        return check_columns(self.source.read(), self.spec, self.builder.finder)

    @contextmanager
    def validator(self, shard: Shard = WHOLE) -> Iterator[RowValidator]:
        """A new validator of a shard's rows, in which no id is claimed yet."""
        with closing(UniqueIds(as_text=self.spec.output.has_text_ids)) as ids:
            yield RowValidator(self.spec.input, self.builder, ids, shard)

    def check_read(self, note: Callable[[str], object]) -> None:
        """Note the kept columns with unreadable cells. Raises InputError if a file has changed."""
        self.source.check_unchanged()
        for name in kept_columns(self.spec, dict.fromkeys(sorted(self.source.unread))):
            note(f"column {shown(name)} has cells that cannot be read: they are null in the outputs")


@contextmanager
def open_job(spec: JobSpec, run_dir: RunDir, now: datetime | None = None) -> Iterator[OpenJob]:
    """Open a job without changing its run directory. See ``read_model`` for ``now``.

    Raises UsageError if the model or the input cannot be used, ModelError, and as ``stage_stdin`` does.
    """
    with stdin_as_file(spec.input, run_dir.spool) as input_spec:
        model = read_model(spec, now)
        spec, source = model.resolved(spec), open_source(input_spec, run_dir.owns)
        if spec.output.format == "auto":
            spec = replace(spec, output=replace(spec.output, format=source.output_format))
        yield OpenJob(spec, model, source)
