"""Steps whose kernels run beside their launches, and repeated ones, give what kernels launched one by one give."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from tiny_model import DTYPES, checked_run, engine_for, random_requests, solo, tiny_model, tokens_of
from torch import Tensor

from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine, replay
from batchgen.engine.replay import CpuRecordings
from batchgen.kernels.inputs import ModelInput, StepOutput
from batchgen.model.decoder import Decoder


@pytest.fixture
def model() -> Decoder:
    return tiny_model(torch.bfloat16, full_attn_idxs=[0, 2])


class Counted:
    """An engine, how many of its steps Python launched, and how many came from a recording."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_launched, self.num_replayed = 0, 0
        replays = engine.runner.replays
        assert isinstance(replays, CpuRecordings)
        self.replays = replays
        record = replays.recorder.record

        def counting(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
            result, again = record(work)
            self.num_launched += 1

            def counted() -> Tensor:
                self.num_replayed += 1
                return again()

            return result, counted

        run = replays.recorder.run

        def noted(work: Callable[[], Tensor]) -> Tensor:
            self.num_launched += 1
            return run(work)

        replays.recorder.record, replays.recorder.run = counting, noted  # type: ignore[method-assign]


def check(model: Decoder, requests: list[Request], **sizes: int) -> Counted:
    """Tokens with recordings are those without; there must have been replays."""
    counted = Counted(engine_for(model, **sizes))
    plain = engine_for(model, **sizes)
    plain.runner.replays = None
    found = tokens_of(checked_run(counted.engine, requests))
    assert found == tokens_of(plain.run(requests))
    assert counted.num_replayed > 0
    return counted


def test_those_that_share_blocks_change_from_replay_to_replay(model: Decoder) -> None:
    stems = [tuple(range(8 + i, 108 + i)) * 3 for i in (0, 13)]
    requests = [
        Request(key, (*stems[key * 7 % 3 % 2], *range(9 + key, 14 + key)), SamplingParams(max_tokens=length))
        for key, length in enumerate([9, 30, 17, 24, 11, 28, 5, 33, 14, 21])
    ]
    counted = Counted(engine_for(model, num_blocks=200, block_size=16, max_num_seqs=8, max_num_batched_tokens=512))
    shared: set[tuple[int, ...]] = set()
    run = counted.replays.run

    def noted(inputs: ModelInput) -> StepOutput:
        shared.add(tuple(inputs.query_blocks[:, 3:].flatten().tolist()))
        output = run(inputs)
        if inputs.is_decode and (found := counted.replays.recorded.get(counted.replays.size_of(inputs))):
            assert torch.equal(found[0].inputs.query_blocks, inputs.query_blocks)
        return output

    counted.replays.run = noted  # type: ignore[method-assign]
    assert tokens_of(counted.engine.run(requests)) == solo(model, requests)
    assert counted.num_replayed > 0
    assert len({groups for groups in shared if any(groups)}) > 3


def test_a_longer_rotary_table_makes_recordings_anew(model: Decoder) -> None:
    long = Request(0, tuple(range(8, 100)) * 11, SamplingParams(max_tokens=40, ignore_eos=True))
    assert len(long.prompt_token_ids) < 1024 < len(long.prompt_token_ids) + 40, "the first table has 1,024 positions"
    counted = check(model, [long], num_blocks=40, block_size=32, max_num_seqs=2, max_num_batched_tokens=512)
    assert len(counted.replays.recorded) == 1
    assert counted.replays.rotary is model.rotary.upto(0)


def test_only_so_many_recordings_are_kept(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MAX_KEPT", 2)
    requests = random_requests(8, seed=5, prompt=(4, 4), output=(1, 60))
    counted = check(model, requests, num_blocks=80, block_size=8, max_num_seqs=8, max_num_batched_tokens=40)
    assert len(counted.replays.recorded) == 2


def test_prompts_are_launched_and_decode_steps_recorded(model: Decoder) -> None:
    counted = Counted(engine_for(model, num_blocks=40, block_size=8, max_num_seqs=2, max_num_batched_tokens=64))
    requests = [Request(i, tuple(range(9 + i, 29)), SamplingParams(max_tokens=4, ignore_eos=True)) for i in range(2)]
    tokens_of(counted.engine.run(requests))
    assert [size.num_seqs for size in counted.replays.recorded] == [2]
    assert (counted.num_launched, counted.num_replayed) == (2, counted.engine.stats.num_steps - 2)


@pytest.mark.usefixtures("threads_as_before")
def test_another_number_of_threads_makes_recordings_anew(model: Decoder) -> None:
    request = Request(0, (9, 10, 11), SamplingParams(max_tokens=30, ignore_eos=True))
    expected = solo(model, [request])
    counted = Counted(engine_for(model, num_blocks=20, block_size=8, max_num_seqs=2))
    counted.engine.submit(request)
    found = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        for _ in range(10):
            found += counted.engine.step()
    assert tokens_of(found) == expected
    assert len(counted.replays.recorded) == 2


@pytest.mark.parametrize("dtype", DTYPES)  # bfloat16 may run recorded steps
def test_engines_in_two_threads_do_not_disturb_each_other(dtype: str) -> None:
    model, requests = tiny_model(DTYPES[dtype]), random_requests(8, seed=2)
    expected = solo(model, requests)
    found: list[dict[int, tuple[int, ...]]] = []

    def run() -> None:
        for _ in range(3):
            engine = engine_for(model, num_blocks=60, block_size=8, max_num_batched_tokens=24)
            found.append(tokens_of(engine.run(requests)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6
