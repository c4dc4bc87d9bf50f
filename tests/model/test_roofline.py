"""How near a run came to what its machine can do: work counted by the engine, over measured rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from report_samples import made
from tiny_model import engine_for, tiny_model

from batchgen.engine.sizes import reported_sizes
from batchgen.engine.stats import EngineStats
from batchgen.model import rates
from batchgen.model.config import LayerShape
from batchgen.model.registry import dummy_config
from batchgen.model.roofline import (
    Ceilings,
    Costs,
    Work,
)
from batchgen.report.facts import details

CONFIG = dummy_config("dummy:LFM2-350M")


def counts(**more: int) -> dict[str, Any]:
    return EngineStats().to_dict() | more


def test_flop_of_the_published_350m_shape_are_those_of_its_description() -> None:
    work = Costs.of(CONFIG, itemsize=2, weight_bytes=2).work(counts(num_steps=1, num_decode_tokens=10, num_logits=10))
    assert work.flops == pytest.approx(2 * (287.4e6 + 67.1e6) * 10, rel=1e-3)
    assert work.num_bytes == pytest.approx(2 * (287.4e6 + 67.1e6), rel=1e-3)


def test_tokens_without_logits_need_nothing_behind_the_last_keys_and_values() -> None:
    work = Costs.of(CONFIG, itemsize=2, weight_bytes=2).work(counts(num_steps=1, num_prefill_tokens=10, num_logits=1))
    feed_forward, query_and_output, convolution = 3 * 1024 * 4608, 2 * 1024 * 1024, 4 * 1024 * 1024
    tail = 2 * feed_forward + query_and_output + convolution  # layer 14 is the last with attention, 15 a convolution
    assert work.flops == pytest.approx(2 * ((287.4e6 - tail) * 10 + tail + 67.1e6), rel=1e-3)


def test_attended_positions_and_read_kv_are_counted_from_the_steps() -> None:
    work = Costs.of(CONFIG, itemsize=2, weight_bytes=2).work(counts(num_attended=1000, num_kv_read=100))
    assert work.flops == 4 * 16 * 64 * (5 * 1000 + 100)  # in the last of 6 layers one token of a sequence attends
    assert work.num_bytes == 12 * 1024 * 100  # 12 KiB a token
    integers = Costs.of(CONFIG, itemsize=2, weight_bytes=2, kv_cache_dtype="int8").work(counts(num_kv_read=100))
    assert integers.num_bytes == 6 * 8 * 2 * (64 + 4) * 100  # of each head in each layer 64 integers and their scale


def test_where_a_text_is_seen_whole_each_token_attends_to_all_of_it() -> None:
    tokens = 100
    found = counts(num_prefill_tokens=tokens, num_attended=tokens * (tokens + 1) // 2, num_kv_read=tokens)
    whole, causal = (
        Costs.of(config, itemsize=2, weight_bytes=2).work(found).flops
        for config in (dummy_config("dummy:LFM2.5-Embedding-350M"), CONFIG)
    )
    assert whole - causal == 4 * 16 * 64 * 5 * (tokens**2 - tokens * (tokens + 1) // 2)


def test_layers_with_a_window_attend_to_and_read_no_more_than_it_holds() -> None:
    config = dummy_config("dummy:LFM3-1.7B")  # 6 layers attend to all positions, the last of them too, 5 to 256
    costs = Costs.of(config, itemsize=2, weight_bytes=2)
    work = costs.work(counts(num_attended=1000, num_kv_read=100, num_window_attended=400, num_window_read=30))
    assert work.flops == 4 * 16 * 128 * (5 * 1000 + 100 + 5 * 400)
    assert work.num_bytes == 2 * 4 * 128 * 2 * (6 * 100 + 5 * 30)
    reverse = replace(config, layers=config.layers[:21])  # the last attention has a window
    work = Costs.of(reverse, itemsize=2, weight_bytes=2).work(counts(num_window_attended=400, num_window_read=30))
    assert work.flops == 4 * 16 * 128 * (4 * 400 + 30)


def test_of_experts_a_step_reads_those_that_its_tokens_are_expected_to_meet() -> None:
    mixture = dummy_config("dummy:LFM2-8B-A1B")
    others = mixture.linear_params_per_token + 65536 * 2048 - 22 * 4 * 3 * 1792 * 2048
    of_experts = 22 * 32 * 3 * 1792 * 2048
    costs = Costs.of(mixture, itemsize=2, weight_bytes=2)
    for tokens, met in ((1, 4.0), (2, 32 * (1 - (7 / 8) ** 2)), (256, 32.0)):
        found = counts(num_steps=1) | {"sum_experts": mixture.expected_experts(tokens)}
        assert costs.work(found).num_bytes == pytest.approx(2 * (others + of_experts * met / 32))
    assert costs.work(counts(num_decode_tokens=1)).flops < 2 * 1.6e9  # of the experts only those that a token meets
    assert CONFIG.expected_experts(100) == 0.0


def test_a_model_without_attention_computes_every_token_to_the_end() -> None:
    plain = replace(CONFIG, layers=(LayerShape("conv", 4608),) * 4)
    work = Costs.of(plain, itemsize=2, weight_bytes=2).work(counts(num_prefill_tokens=10))
    assert work.flops == 2 * plain.linear_params_per_token * 10


def test_the_floor_is_set_by_the_scarcer_resource() -> None:
    ceilings = Ceilings(flops_per_s=100.0, memory_bytes_per_s=10.0)
    assert Work(1000.0, 10.0).floor_s(ceilings) == 10.0
    assert Work(10.0, 1000.0).floor_s(ceilings) == 100.0


def test_the_mean_of_two_measurements_is_that_of_both_rates() -> None:
    assert Ceilings(1.0, 2.0).mean(Ceilings(2.0, 4.0)) == Ceilings(1.5, 3.0)


class FakeEvent:
    """Takes the time from a clock of the device's own."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.is_done = False

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def synchronize(self) -> None:
        self.is_done = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end.is_done
        return end.at_ms - self.at_ms


def test_on_a_gpu_work_is_timed_by_events_at_sizes_that_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        FakeEvent.now_ms += 250

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    assert rates._times_s(work, torch.device("cuda", 0), 3, 1.0) == [0.25] * 4
    on_gpu = rates.THOROUGH.on(torch.device("cuda", 0))
    assert rates.THOROUGH.on(torch.device("cpu")) is rates.THOROUGH
    assert max(on_gpu.row_counts) == 8192 and on_gpu.buffer_bytes >= 4 << 30


def test_the_most_memory_of_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    engine = engine_for(tiny_model(), num_blocks=4, block_size=16)
    model = engine.runner.model
    assert "max_device_bytes" not in reported_sizes(engine.config, model)
    model.device = torch.device("cuda", 0)
    sizes = reported_sizes(engine.config, model)
    assert sizes["max_device_bytes"] == 3 << 30
    rows = dict(details(made() | {"sizes": sizes}).rows)
    assert rows["memory"].endswith(", 3,072 MiB of the GPU at most")
