"""What the user left open is chosen; what cannot work is refused by name."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import DTYPES, raw_config, state_tensors, tiny_model

from batchgen.core.errors import ExitCode, UsageError
from batchgen.core.machine import available_bytes, total_bytes
from batchgen.engine import Engine, EngineConfig
from batchgen.engine import sizes as sizes_module
from batchgen.engine.sizes import cache_dtype, resolve, sizes_for, use_threads
from batchgen.model.config import ModelConfig
from batchgen.model.registry import dummy_config, parse_config
from batchgen.model.state import KV_DTYPES, allocate

MODEL = tiny_model(max_position_embeddings=500)
BLOCK_BYTES = MODEL.config.kv_block_bytes(16, 4)


def test_kv_cache_memory_is_what_the_blocks_take() -> None:
    config = EngineConfig(block_size=16, kv_cache_memory=7 * BLOCK_BYTES + 1, max_num_seqs=5, max_num_batched_tokens=33)
    sizes = resolve(config, MODEL)
    assert (sizes.num_blocks, sizes.block_size, sizes.max_num_tokens) == (7, 16, 112)
    assert (sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.max_model_len) == (5, 33, 500)


def test_what_is_left_open_depends_on_the_device() -> None:
    config = EngineConfig(kv_cache_memory=1 << 40, max_model_len=40)
    cpu, gpu = (sizes_for(config, MODEL.config, 2, 1 << 40, is_cuda=is_cuda) for is_cuda in (False, True))
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens, cpu.block_size) == (256, 512, 32)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens, gpu.block_size) == (1024, 8192, 64)
    assert (cpu.admits_in_batches, cpu.forecast_memory) == (False, True)
    assert (gpu.admits_in_batches, gpu.forecast_memory) == (True, False)
    assert sizes_for(EngineConfig(max_num_seqs=3, max_model_len=40), MODEL.config, 2, 1 << 40).max_num_seqs == 3


def test_no_more_blocks_are_made_than_could_ever_be_used() -> None:
    sizes = resolve(EngineConfig(block_size=16, kv_cache_memory=1 << 40, max_num_seqs=3, max_model_len=40), MODEL)
    assert sizes.num_blocks == 3 * 3


def test_the_trained_length_bounds_the_context() -> None:
    assert resolve(EngineConfig(max_model_len=10_000), MODEL).max_model_len == 500
    assert resolve(EngineConfig(max_model_len=60), MODEL).max_model_len == 60
    assert resolve(EngineConfig(), MODEL).max_model_len == 500


def test_auto_memory_leaves_room_for_the_state_of_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = 100 * MODEL.config.conv_slot_bytes(4)
    monkeypatch.setattr(sizes_module, "available_bytes", lambda: 2 * (10 * BLOCK_BYTES + slots))
    assert resolve(EngineConfig(block_size=16, max_num_seqs=100), MODEL).num_blocks == 10


def test_a_gpu_gives_blocks_what_weights_full_steps_and_a_tenth_leave() -> None:
    model = dummy_config("dummy:LFM2-350M")
    most = sizes_for(EngineConfig(max_model_len=2048), model, 2, 75 << 30, is_cuda=True)
    assert (most.max_num_seqs, most.max_num_tokens) == (1024, 1024 * 2048), "all can be as long as they may"
    for free in (8 << 30, 20 << 30):
        sizes = sizes_for(EngineConfig(), model, 2, free, is_cuda=True)
        blocks = sizes.num_blocks * model.kv_block_bytes(sizes.block_size, 2) + 1024 * model.conv_slot_bytes(2)
        activations, copies, counts = 8192 * 2 * (1024 + 4608) * 2, 1024 * 65536 * 6, 1024 * 65536 * 4
        scored = 8192 * 65536 * 2  # the logits of all tokens of a step of prompts
        assert 2 * activations + copies + counts + scored + (1 << 30) < 0.9 * free - blocks < 3.5 * (1 << 30)
    with pytest.raises(UsageError, match="kv_cache_memory 0 bytes holds no block"):
        sizes_for(EngineConfig(), model, 2, 1 << 30, is_cuda=True)


def test_memory_that_torch_keeps_on_a_gpu_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    gpu: Any = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(gc, "collect", lambda: log.append("collect"))
    for name, value in {"mem_get_info": (1000, 9000), "memory_reserved": 700, "memory_allocated": 500}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name, value=value: log.append(name) or value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty_cache"))
    assert sizes_module._memory(gpu) == (1200, 9000)
    assert log[:2] == ["collect", "empty_cache"], "dead engines are gone before anything is asked"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, (0, -1)) for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "threads")),
        *(("max_model_len", (1, 0, -5)), ("kv_cache_memory", (10, 0, -1)), ("look_ahead", (0, -3))),
    ],
)
def test_a_size_that_cannot_work_is_refused_by_name(name: str, values: tuple[int, ...]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=name) as caught:
            resolve(EngineConfig(**{name: value}), MODEL)
        assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("name", ["LFM2-350M", "Qwen3-0.6B", "Gemma-3-270M"])
@pytest.mark.parametrize("gib", [3, 4, 8, 10, 80])
def test_a_small_card_takes_smaller_steps_so_that_blocks_have_half_of_its_memory(gib: int, name: str) -> None:
    model, free = dummy_config(f"dummy:{name}"), gib << 30
    sizes = sizes_for(EngineConfig(), model, 2, free, is_cuda=True)
    assert sizes.num_blocks * model.kv_block_bytes(64, 2) >= 0.25 * free or sizes.num_blocks == 1 << 22
    assert (sizes.max_num_seqs, sizes.max_num_batched_tokens) == (1024, 8192) or gib <= 10
    given = sizes_for(EngineConfig(max_num_seqs=16, max_num_batched_tokens=512), model, 2, free, is_cuda=True)
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (16, 512)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "block_size"])
def test_a_size_beyond_any_use_is_refused_by_name(name: str) -> None:
    for value in (10**9, 10**400):
        with pytest.raises(UsageError, match=f"{name} .*: must be .* from 1 to") as caught:
            EngineConfig(**{name: value})
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("kv_cache_memory", {"kv_cache_memory": 1 << 50}),
        ("max_num_seqs", {"max_num_seqs": 60_000, "block_size": 1, "kv_cache_memory": BLOCK_BYTES}),
        ("max_num_batched_tokens", {"max_num_batched_tokens": 1 << 20, "kv_cache_memory": 1000 * BLOCK_BYTES}),
    ],
    ids=str,
)
def test_a_size_that_needs_more_memory_than_there_is_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, int]
) -> None:
    monkeypatch.setattr(sizes_module, "total_bytes", lambda: 1000 * BLOCK_BYTES)
    with pytest.raises(UsageError, match=rf"^{name}: .* GB, the device has .* GB; lower it$"):
        resolve(EngineConfig(**changes), MODEL)


def test_no_more_blocks_are_made_than_the_host_can_keep_books_on() -> None:
    config = parse_config(raw_config(full_attn_idxs=[], max_position_embeddings=2**31 - 1), "")
    model = replace(config, conv_l_cache=1)
    assert sizes_for(EngineConfig(), model, 4, 1 << 40).num_blocks <= 1 << 22


def test_more_threads_than_could_be_of_use_are_refused(threads_as_before: None) -> None:
    use_threads(64, MODEL.config)
    assert torch.get_num_threads() == 64
    for threads in (100_000, 10**400):
        with pytest.raises(UsageError, match=r"^threads 1.*0: at most \d+ on this machine, which has \d+ CPUs$"):
            use_threads(threads, MODEL.config)
        with pytest.raises(UsageError, match="threads"):
            Engine(MODEL, EngineConfig(threads=threads))
    assert torch.get_num_threads() == 64


def test_no_more_threads_run_than_a_container_may(threads_as_before: None, monkeypatch: pytest.MonkeyPatch) -> None:
    large = dummy_config("dummy:LFM2-350M")
    torch.set_num_threads(8)
    monkeypatch.setattr(sizes_module, "num_usable_cpus", lambda: 3)
    assert use_threads(None, large) == torch.get_num_threads() == 3


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *KV_DTYPES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bytes_counted_are_the_bytes_allocated(dtype: torch.dtype, kv_cache_dtype: str) -> None:
    for block_size in (3, 16, 24):
        state = allocate(
            MODEL.config,
            num_blocks=9,
            block_size=block_size,
            num_slots=4,
            dtype=dtype,
            device=MODEL.device,
            kv_cache_dtype=KV_DTYPES.get(kv_cache_dtype),
        )
        spare = sum(kv.keys[0].nbytes for kv in state.kv) + sum(conv.slots.nbytes for conv in state.conv)
        blocks = sum(tensor.nbytes for tensor in state_tensors(state)) - spare
        assert blocks == 9 * MODEL.config.kv_block_bytes(block_size, dtype.itemsize, kv_cache_dtype)
        assert sum(conv.slots.nbytes for conv in state.conv) == 4 * MODEL.config.conv_slot_bytes(dtype.itemsize)
        assert not any(tensor.any() for tensor in state_tensors(state))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_type_in_which_keys_are_computed_is_auto_by_another_name(dtype: str) -> None:
    model = tiny_model(DTYPES[dtype])
    for kv_cache_dtype in ("auto", *KV_DTYPES):
        engine = Engine(model, EngineConfig(kv_cache_dtype=kv_cache_dtype, kv_cache_memory=1 << 20))
        is_same = kv_cache_dtype in ("auto", dtype)
        assert engine.config.kv_cache_dtype == ("auto" if is_same else kv_cache_dtype)
        assert engine.numerics == model.numerics | ({} if is_same else {"kv_cache_dtype": kv_cache_dtype})


def test_an_unknown_type_of_keys_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"^kv_cache_dtype ['\"]fp8['\"]: must be .*auto, bfloat16, int8$"):
        EngineConfig(kv_cache_dtype="fp8")


def test_a_gpu_keeps_keys_as_they_are_computed_or_as_integers_and_says_so() -> None:
    gpu: Any = SimpleNamespace(numerics={"dtype": "float32"}, device=torch.device("cuda"))
    assert cache_dtype("auto", gpu) == cache_dtype("float32", gpu) == "auto"
    assert cache_dtype("int8", gpu) == "int8"
    with pytest.raises(UsageError, match=r'^kv_cache_dtype bfloat16: a GPU keeps .* "auto", or as integers, "int8"$'):
        cache_dtype("bfloat16", gpu)


@pytest.mark.parametrize(
    ("name", "kv_token_kib", "conv_kib"),
    [("LFM2-350M", 12, 40), ("LFM2-700M", 12, 60), ("LFM2-1.2B", 12, 80), ("LFM2-2.6B", 16, 176)],
)
def test_the_published_shapes_take_the_published_state(name: str, kv_token_kib: int, conv_kib: int) -> None:
    config: ModelConfig = dummy_config(f"dummy:{name}")
    assert config.kv_block_bytes(32, 2) == (32 * kv_token_kib + conv_kib) * 1024
    assert config.kv_position_bytes(2) == kv_token_kib * 1024
    assert config.kv_block_bytes(32, 4, "bfloat16") == (32 * kv_token_kib + 2 * conv_kib) * 1024
    scales = 2 * 4 * config.num_kv_heads * config.num_attention_layers  # float32, of keys and of values
    assert config.kv_position_bytes(4, "int8") == kv_token_kib * 1024 // 2 + scales
    assert config.conv_slot_bytes(2) == conv_kib * 1024


def test_available_memory_is_a_sane_number() -> None:
    assert 0 < available_bytes() <= total_bytes() < 1 << 50


@pytest.mark.parametrize(("device", "threads", "expected"), [("cuda", None, 1), ("cuda", 2, 2), ("cpu", None, 3)])
def test_the_host_of_a_gpu_takes_one_thread_unless_told(
    monkeypatch: pytest.MonkeyPatch, device: str, threads: int | None, expected: int
) -> None:
    """An engine that goes no further than to its threads: no GPU is needed."""
    monkeypatch.setattr("batchgen.engine.engine.resolve", None)
    torch.set_num_threads(3)
    with pytest.raises(TypeError, match="not callable"):
        Engine(SimpleNamespace(device=torch.device(device), config=MODEL.config), EngineConfig(threads=threads))  # type: ignore[arg-type]
    assert torch.get_num_threads() == expected
