"""Token ids from step to step within recordings: those of steps that end before the next begins, and fewer launches.

A stand-in that calls again takes the place of CUDA graphs, and a device that answers late that of a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import Again, Device
from tiny_model import checked_run, random_requests, tiny_model, tokens_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine, EngineConfig, graphs, replay
from batchgen.engine.graphs import CudaGraphs
from batchgen.engine.model_runner import ModelRunner

MODEL = tiny_model()
GREEDY = SamplingParams(ignore_eos=True)
KINDS = (
    GREEDY,
    SamplingParams(stop_token_ids=tuple(range(10, 40))),
    SamplingParams(temperature=1.0, seed=3, ignore_eos=True),
    SamplingParams(temperature=1.0, stop_token_ids=tuple(range(20, 30)), min_tokens=3),
    SamplingParams(repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(temperature=1.0, n=2, presence_penalty=1.5),
    SamplingParams(logprobs=2, ignore_eos=True),
    SamplingParams(logit_bias=((20, 9.0), (21, 8.5)), allowed_token_ids=tuple(range(10, 90))),
)


@contextmanager
def recorded(recorder: Again, **sizes: Any) -> Iterator[Engine]:
    """An engine whose steps overlap and come from recordings, more of which are made as contexts grow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_USUAL_TOKENS", 8)
        patch.setattr(replay, "has_graphs", lambda _: True)
        patch.setattr(replay, "CudaRecorder", lambda _: recorder)
        yield Engine(MODEL, config_of(**sizes), runner=partial(ModelRunner, overlaps=True, fetch=Device()))


def config_of(num_blocks: int = 200, **sizes: Any) -> EngineConfig:
    memory = num_blocks * MODEL.config.kv_block_bytes(4, MODEL.dtype.itemsize)
    return EngineConfig(block_size=4, kv_cache_memory=memory, forecast_memory=False, share_duplicates=False, **sizes)


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    max_num_seqs=st.integers(2, 9),
    max_num_batched_tokens=st.integers(9, 40),
    num_blocks=st.integers(13, 50),
    seed=st.integers(0, 99),
)
def test_tokens_are_those_of_an_engine_that_waits_for_each_step(
    kinds: list[SamplingParams], seed: int, **sizes: int
) -> None:
    requests = [
        replace(r, params=replace(kinds[i % len(kinds)], max_tokens=r.params.max_tokens))
        for i, r in enumerate(random_requests(9, seed=seed, prompt=(1, 20), output=(1, 24)))
    ]
    expected = tokens_of(Engine(MODEL, config_of(**sizes), runner=partial(ModelRunner, overlaps=False)).run(requests))
    with recorded(Again(), **sizes) as engine:
        assert tokens_of(checked_run(engine, requests)) == expected


class Outside(TorchDispatchMode):
    """Counts torch's operations on memory that a GPU would hold: the given tensors and what is made of them."""

    def __init__(self, *on_device: Tensor) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.on_device = list(on_device)  # kept, so that no address is given twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in self.on_device}
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if not func.is_view and any(a.untyped_storage().data_ptr() in known for a in given):
            self.found[func.overloadpacket.__name__] += 1
            self.on_device += [a for a in tree_leaves(result) if isinstance(a, Tensor)]
        return result


class Uncounted(Again):
    """Replays whose operations are not counted, as a GPU launches them together; each is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_replayed = 0
        self.outside: Outside | None = None
        self.results: list[Tensor] = []

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        result, again = super().record(work)
        self.results.append(result)

        def replay() -> Tensor:
            self.num_replayed += 1
            before = self.outside.found.copy() if self.outside is not None else None
            again()
            if self.outside is not None and before is not None:
                self.outside.found = before
            return result

        return result, replay


def launches_outside(params: SamplingParams) -> Counter[str]:
    """Torch's operations of a step behind some others, beside those that its recording repeats."""
    recorder = Uncounted()
    with recorded(recorder, max_num_seqs=3) as engine:
        for key in range(3):
            engine.submit(Request(key, (9, 10 + key), replace(params, max_tokens=30)))
        for _ in range(4):
            engine.step()
        replays, before = engine.runner.replays, recorder.num_replayed
        assert isinstance(replays, CudaGraphs) and engine.overlap is not None
        statics, logits = zip(*replays.recorded.values(), strict=True), recorder.results
        with Outside(replays.last_token_ids, *(s._target for s in next(statics)), *logits) as recorder.outside:
            engine.overlap._launch(engine.scheduler.schedule())
    assert recorder.num_replayed == before + 1
    return recorder.outside.found


def test_behind_a_greedy_step_a_greedy_step_launches_its_upload_and_its_replay() -> None:
    assert launches_outside(GREEDY) == {"copy_": 1}


def test_logits_that_are_changed_are_searched_again_and_the_ids_put_where_the_replay_reads_them() -> None:
    found = launches_outside(SamplingParams(logit_bias=((20, 9.0),), ignore_eos=True))
    assert found["gather"] == found["masked_fill_"] == 1
    assert found["copy_"] == 3, "the upload, the ids, and the logits as float32"
