"""What an invocation needs of an engine: the real one, the stub of the tests and a pool of workers keep to it alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from stub_engine import StubEngine
from tiny_model import engine_for, tiny_model, tokens_of

from batchgen.core.records import Request, SamplingParams
from batchgen.run.loaded_engine import EngineLike
from batchgen.workers.dispatcher import RowDispatcher
from batchgen.workers.driver import WorkersEngine
from batchgen.workers.handle import WorkerHandle, WorkerLauncher
from batchgen.workers.messages import Identity, WorkerReady, WorkerUpdate
from batchgen.workers.worker_state import Liveness

SIZES: dict[str, int] = {"max_num_seqs": 4, "look_ahead": 8}
MAX_PULLED = 600  # of a pool, which takes a head start; the others take ``look_ahead`` and ``max_num_seqs``


class StubWorker:
    """A worker whose stub engine takes a step each time that the driver calls it."""

    def __init__(self) -> None:
        self._engine = StubEngine(**SIZES)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future = Future[Any]()
        if method == "begin":
            future.set_result(WorkerReady(Identity({}, {}, ""), max_num_seqs=4, threads=1))
            return future
        (assignments,) = arguments
        for task in (task for assignment in assignments for task in assignment.tasks):
            self._engine.submit(task)
        stopped = any(assignment.stop for assignment in assignments)
        results = tuple(self._engine.flush() if stopped else self._engine.step())
        stats = self._engine.stats.to_dict()
        future.set_result(WorkerUpdate(results, self._engine.unfinished(), stats=stats, stopped=stopped))
        return future

    def kill(self) -> None:
        pass


class StubLauncher(WorkerLauncher):
    """Starts one worker."""

    def has_room(self) -> bool:
        return not self.handles

    def place(self) -> tuple[StubWorker, Future[str]]:
        placed = Future[str]()
        placed.set_result("")
        return StubWorker(), placed

    def begin(self, handle: WorkerHandle) -> Future[Any]:
        return handle.remote.call("begin")


def real() -> Any:
    return engine_for(tiny_model(), num_blocks=64, block_size=8, **SIZES)


def pool() -> WorkersEngine:
    engine = WorkersEngine(StubLauncher((1, 1)), RowDispatcher(), Liveness(), lambda hello: "")
    engine.begin()
    return engine


STEPPED: dict[str, Callable[[], Any]] = {"engine": real, "stub": lambda: StubEngine(**SIZES)}
ENGINES: dict[str, Callable[[], EngineLike]] = {"engine": real, "stub": lambda: StubEngine(**SIZES), "pool": pool}


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> Callable[[], EngineLike]:
    return ENGINES[request.param]


def requests(count: int) -> list[Request]:
    """Rows of different prompts and lengths."""
    return [Request(k, (1 + k % 90, 1 + k // 90), SamplingParams(max_tokens=5 + k % 7)) for k in range(count)]


class Source:
    """Requests, and how many of them were pulled."""

    def __init__(self, count: int) -> None:
        self._requests = requests(count)
        self.num_pulled = 0

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests:
            self.num_pulled += 1
            yield request


def test_every_request_has_one_result_and_what_is_counted_adds_up(make: Callable[[], EngineLike]) -> None:
    engine = make()
    tokens = tokens_of(engine.run(requests(60)))
    assert sorted(tokens) == list(range(60))
    assert not engine.unfinished()
    assert engine.stats.num_output_tokens == engine.stats.to_dict()["num_output_tokens"]
    assert engine.stats.num_output_tokens == sum(map(len, tokens.values()))


def test_requests_are_pulled_as_they_are_needed(make: Callable[[], EngineLike]) -> None:
    engine, source = make(), Source(5000)
    results = engine.run(source)
    assert source.num_pulled == 0
    next(results)
    assert source.num_pulled <= (MAX_PULLED if isinstance(engine, WorkersEngine) else sum(SIZES.values()))
    engine.stop()
    assert all(result.key < source.num_pulled for result in results)


def test_a_stop_pulls_no_more_and_what_is_half_done_goes_on_to_the_same_tokens(make: Callable[[], EngineLike]) -> None:
    expected = tokens_of(make().run(requests(60)))
    engine, source = make(), Source(60)
    done = {}
    for result in engine.run(source):
        done[result.key] = result.first.token_ids
        if len(done) == 10:
            engine.stop()
            num_pulled = source.num_pulled
    assert source.num_pulled == num_pulled
    partials = dict(engine.unfinished())
    assert partials and all(partials.values())
    assert not partials.keys() & done.keys()
    rest = [replace(r, output_token_ids=partials.get(r.key, ())) for r in requests(60) if r.key not in done]
    assert done | tokens_of(make().run(rest)) == expected


@pytest.mark.parametrize("name", STEPPED)
def test_a_host_may_submit_and_step_in_turns(name: str) -> None:
    engine = STEPPED[name]()
    results, waiting = [], requests(20)
    assert not engine.has_work
    while waiting or engine.has_work:
        for request in waiting[:3]:
            answer = engine.submit(request)
            results += [] if answer is None else [answer]
        waiting = waiting[3:]
        results += engine.step()
    results += engine.flush()
    assert tokens_of(results) == tokens_of(STEPPED[name]().run(requests(20)))  # type: ignore[attr-defined]
    assert not engine.unfinished()
