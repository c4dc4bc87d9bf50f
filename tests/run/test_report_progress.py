"""The time left of a run is told by tokens, and ``status --watch`` follows it to its end."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_helpers import JobMaker, Shell, rows_of
from stub_engine import stub_factory

from batchgen.core.records import Result, Sample, Timings
from batchgen.run.display import Display
from batchgen.run.progress import Progress, read_progress
from batchgen.run.status import read_status, render_status
from batchgen.run.stop import Limits, Stopper


def progress(folder: Path, *, computed: int, done: int, finished_tokens: int, before: int = 0) -> Progress:
    found = Progress(folder, Display(), Stopper(Limits()))
    found.rows_total = 100
    counts: dict[str, Any] = {"num_done": done, "num_failed": 0, "num_done_before": before, "empty_fields": {}}
    counts |= {"num_prompt_tokens": 0, "num_generated_tokens": 0, "num_computed_tokens": finished_tokens}
    found.sink = SimpleNamespace(**counts)  # type: ignore[assignment]  # the counts are all that is asked
    stats = SimpleNamespace(num_prefill_tokens=computed, num_output_tokens=0, to_dict=dict)
    backend = SimpleNamespace(engine=SimpleNamespace(stats=stats), workers=tuple)
    with found.generating(backend):  # type: ignore[arg-type]  # likewise
        pass
    return found


@pytest.mark.parametrize(
    ("counts", "eta_s"),
    [
        ({"computed": 1000, "done": 10}, 180),  # 90 rows of 100 tokens each
        ({"computed": 4000, "done": 10}, 120),
        ({"computed": 20_000, "done": 10}, 90),
        ({"computed": 1000, "done": 50, "before": 40}, 100),  # 50 rows of 100 tokens each
        ({"computed": 500, "done": 0, "finished_tokens": 0}, None),
    ],
    ids=[
        "the tokens left over the rate",
        "without what rows under way have computed",
        "not near for much work under way",
        "rows of earlier invocations do not make later ones short",
        "not before the first row is done",
    ],
)
def test_the_time_left(tmp_path: Path, counts: dict[str, int], eta_s: int | None) -> None:
    found = progress(tmp_path, **{"finished_tokens": 1000} | counts)
    found._samples.extend([(0.0, 0), (1.0, 50)])
    assert found.snapshot()["eta_s"] == eta_s
    assert eta_s != 180 or found.snapshot()["tokens"]["estimated"] == 10_000


def test_copies_and_cached_prompts_cost_no_time() -> None:
    def cost(**timings: Any) -> int:
        return Result(0, 10, (Sample((1, 2, 3)),), timings=Timings(**timings)).num_computed_tokens

    assert cost(prefill_s=0.1) == 13
    assert cost(prefill_s=0.1, cached_tokens=8) == 5
    assert cost(queue_s=0.1, cached_tokens=10) == 0
    assert Result(0, 10, (Sample((1, 2)),), label_logprobs=(-1.0, -2.0)).num_computed_tokens == 10


@pytest.mark.parametrize(
    ("state", "written_s", "more_s"), [("running", 1.5, 1.5), ("running", 9e5, 2.5), ("stopped", 1, 0)]
)
def test_the_time_of_a_killed_invocation_goes_up_to_its_last_row(
    tmp_path: Path, state: str, written_s: float, more_s: float
) -> None:
    (journal := tmp_path / "journal" / "0001-00000000").mkdir(parents=True)
    (segment := journal / "000000-00000000.seg").touch()
    killed = progress(tmp_path, computed=1000, done=10, finished_tokens=1000)
    killed.state = state
    killed.count_for(journal.name)
    killed._save(killed._content(killed.snapshot()))
    saved_at = (tmp_path / "progress.json").stat().st_mtime - 1e6
    for path, at in ((tmp_path / "progress.json", saved_at), (segment, saved_at + written_s)):
        os.utime(path, (at, at))
    before = (read_progress(tmp_path) or {})["spent"]
    with Progress(tmp_path, Display(), Stopper(Limits())) as found:
        after = found._before["spent"]
        found.keep_file(True, is_idle=True)
    assert after["wall_s"] - before["wall_s"] == pytest.approx(more_s)
    assert after["device_s"] / after["wall_s"] == pytest.approx(before["device_s"] / before["wall_s"])
    assert sum(after["seconds"].values()) - sum(before["seconds"].values()) == pytest.approx(more_s)
    with Progress(tmp_path, Display(), Stopper(Limits())) as found:
        assert found._before["spent"] == after, "it is added once"


def test_progress_is_saved_as_soon_as_rows_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only every two seconds: a kill before that would lose the time of loading and the name of the journal."""
    monkeypatch.setattr("batchgen.run.progress._SAVE_EVERY_S", 1e9)
    stats = SimpleNamespace(num_prefill_tokens=0, num_output_tokens=0, to_dict=dict)
    backend = SimpleNamespace(engine=SimpleNamespace(stats=stats), workers=tuple)
    with Progress(tmp_path, Display(), Stopper(Limits())) as found:
        found.count_for("0001")
        with found.generating(backend):  # type: ignore[arg-type]  # no more is asked of it
            for _ in range(3000):  # of which the first hundred do
                if (saved := read_progress(tmp_path)) is not None:
                    break
                time.sleep(0.01)
    assert saved is not None and saved["journal"] == "0001"


def test_watching_a_finished_run_shows_it_once(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(3))
    job.run()
    assert shell("status", job.output, "--watch", "--json").json["state"] == "finished"


def test_a_finished_run_has_the_rate_of_its_whole_time(job: JobMaker) -> None:
    job.write(rows_of(12))
    report = job.run(step_s=0.01).report
    assert report is not None
    computed = report["computed_tokens"]
    found = read_status(job.output)
    assert found["tokens"]["computed"] == computed > 0
    assert found["tokens_per_s"] == pytest.approx(computed / report["wall_s"], rel=0.01)
    assert "tok/s computed" in render_status(found)


def ends(job: JobMaker, shell: Shell, code: int, *flags: str) -> dict[str, Any]:
    """The last event of a run of the job's file."""
    said = shell("run", job.toml(), "--json-progress", *flags, code=code, engine=stub_factory()).err
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def test_the_last_event_says_what_status_says_of_the_finished_run(job: JobMaker, shell: Shell) -> None:
    job.write([*rows_of(5), {"id": "bad"}])
    for flags in ((), (), ("--overwrite",), ("--max-total-tokens", "1")):
        end, status = ends(job, shell, 3, *flags), read_status(job.output)
        assert (end["event"], end["state"], end["phase"], end["advice"]) == ("end", "finished", "done", None), flags
        assert end["rows"] == status["rows"] == {"total": 6, "done": 5, "failed": 1, "left": 0}


def test_the_last_event_of_a_stopped_run_says_how_to_go_on(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(40))
    end = ends(job, shell, 75, "--max-total-tokens", "1")
    assert (end["state"], end["advice"]) == ("stopped", "run again to resume")


def test_progress_that_cannot_be_read_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    (tmp_path / "progress.json").write_text("{}")
    monkeypatch.setattr("batchgen.run.progress.read_regular", fail)
    with Progress(tmp_path, Display(), Stopper(Limits())) as found:
        found.keep_file(True, is_idle=False)
    assert json.loads((tmp_path / "progress.json").read_text())["rows"]["done"] == 0
