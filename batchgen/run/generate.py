"""The middle of every run: rows in, results into the ledger, until the rows end or somebody asks to stop.

It sees the feed on one side and the engine on the other, and nothing of files, manifests or reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from batchgen.core.records import BadRow, Record
from batchgen.run.loader import Backend
from batchgen.run.progress import GENERATING, Progress
from batchgen.run.requests import Feed
from batchgen.run.results import Ledger

Rows = Iterable[Record | BadRow]


def generate(rows: Rows, feed: Feed, ledger: Ledger, progress: Progress, load: Callable[[], Backend]) -> bool:
    """Run every row and enter what became of it into ``ledger``; returns whether all of them ended.

    ``load`` is called once there is something to generate. On a stop the tokens of half-done rows are saved.
    """
    stopper = progress.stopper
    requests = feed.requests(rows)
    with progress.phase("reading the input", "read"):
        first = next(requests, None)
    if first is not None:
        engine = load().engine
        progress.engine = engine
        try:
            with progress.phase(GENERATING, "generate"), stopper.drain_with(engine.stop):
                for result in engine.run(chain([first], requests)):
                    pending = feed.pending.pop(result.key)
                    ledger.finish(pending.record, pending.id, result, pending.choices)
                    stopper.check_limits(progress.computed_tokens)
                    ledger.check_error_rate(stopper)
        finally:
            ledger.close()
        if feed.pending:
            ledger.journal.save_partials(engine.unfinished())
    ledger.journal.commit()
    return feed.is_exhausted and not feed.pending
