"""Tiny random LFM2s and the few helpers that the tests of model, kernels and engine share.

Weights come from ``RandomTensors``, wide enough (``STD``) that the next token is a clear choice: with the usual 0.02
all logits are nearly equal and a wrong model would go unnoticed.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import raw_config
from reference_kernels import ReferenceKernels
from safetensors.torch import save_file
from torch import Tensor

from batchgen.core.records import Request, Result, SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.model_input import build_input
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.observers import HostTokenCounts
from batchgen.engine.schedule import Schedule
from batchgen.engine.sequence import RequestState
from batchgen.engine.sequence import Sequence as EngineSequence
from batchgen.kernels.cpu.backend import CpuKernels
from batchgen.kernels.inputs import ModelInput
from batchgen.kernels.interface import Kernels, TableEmbedding
from batchgen.kernels.plain import PlainKernels
from batchgen.kernels.select import select
from batchgen.model.decoder import Decoder
from batchgen.model.registry import parse_config
from batchgen.model.state import StateCache, allocate, key_pack
from batchgen.model.weights import Init, RandomTensors

CPU = torch.device("cpu")
BACK_ENDS: dict[str, type[Kernels]] = {"cpu": CpuKernels, "plain": PlainKernels, "reference": ReferenceKernels}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STD = 0.3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread unless a test sets more: for tiny tensors a second one only waits, longest on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_model(
    dtype: torch.dtype = torch.float32, kernels: Kernels | None = None, seed: int = 0, **changes: Any
) -> Decoder:
    """A random model of ``raw_config(**changes)``; the same weights for the same seed."""
    config = parse_config(raw_config(**changes), "tiny")
    with torch.inference_mode():
        return Decoder(config, RandomTensors(dtype, CPU, seed, STD), kernels or select(CPU, dtype))


def spoil(model: Decoder, token: int, value: float) -> None:
    """Make every number of a token's embedding ``value``, in a model whose head is another table."""
    assert isinstance(model.embedding, TableEmbedding)
    table = model.embedding.table.clone()  # of an inference tensor, outside inference mode: may be written
    table[token] = value
    model.embedding.table = table


class RecordedTensors(RandomTensors):
    """Random tensors that remember what was asked for: the tensors a checkpoint of this shape must hold."""

    def __init__(self) -> None:
        super().__init__(torch.float32, CPU, std=STD)
        self.tensors: dict[str, Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], init: Init | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        self.tensors[name] = super().take(name, shape, init, dtype).clone()
        return self.tensors[name]


def write_checkpoint(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """Write ``config.json`` and ``model.safetensors``; the tensors written."""
    raw = raw_config(**changes)
    source = RecordedTensors()
    Decoder(parse_config(raw, "tiny"), source, ReferenceKernels())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(source.tensors, folder / "model.safetensors")
    return source.tensors


def random_state(model: Decoder, *, num_blocks: int, block_size: int, num_slots: int) -> StateCache:
    """State full of numbers, the same on every device; with one block and one slot to spare."""
    state = allocate(
        model.config,
        num_blocks=num_blocks + 1,
        block_size=block_size,
        num_slots=num_slots + 1,
        dtype=model.dtype,
        device=model.device,
    )
    generator = torch.Generator().manual_seed(0)
    for tensor in state_tensors(state):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return state


def packed_keys(keys: Tensor, pack: int | None = None) -> Tensor:
    """Keys [num_blocks, num_kv_heads, width, lanes] as ``KVCache`` lays them out on the CPU."""
    pack = pack or key_pack(keys.dtype, CPU, keys.shape[2])
    unflattened: Tensor = keys.unflatten(2, (-1, pack))
    return unflattened.transpose(3, 4).contiguous()


def state_tensors(state: StateCache) -> list[Tensor]:
    """All that a step may write."""
    kv = [tensor for cache in state.kv for tensor in (cache.keys, cache.values, cache.scales) if tensor is not None]
    return kv + [tensor for conv in state.conv for tensor in (conv.slots, conv.blocks)]


def sequence_at(
    token_ids: Sequence[int], num_computed: int, block_table: Sequence[int], conv_slot: int, key: int = 0
) -> EngineSequence:
    """A sequence in the middle of its life, as the scheduler would leave it before a step."""
    sequence = RequestState(Request(key, tuple(token_ids))).sequences[0]
    sequence.num_computed_tokens = num_computed
    sequence.block_table = array("i", block_table)
    sequence.conv_slot = conv_slot
    return sequence


def token_counts(prompt: Iterable[int], output: Iterable[int]) -> HostTokenCounts:
    """The counts of a sequence that has generated ``output``."""
    counts = HostTokenCounts(list(prompt))
    for token in output:
        counts.push(token)
    return counts


def whole_input(token_ids: Sequence[int], block_size: int) -> ModelInput:
    """One sequence from its first token to its last, with logits for every token."""
    blocks = range(-(-len(token_ids) // block_size))
    schedule = Schedule({sequence_at(token_ids, 0, blocks, 0): len(token_ids)})
    return replace(build_input(schedule, block_size), logits_indices=torch.arange(len(token_ids)))


def prefix_logits(model: Decoder, token_ids: Sequence[int], block_size: int = 16) -> Tensor:
    """Logits [num_tokens, vocab_size] of a whole sequence in one uncached, unbatched forward pass."""
    state = allocate(
        model.config,
        num_blocks=-(-len(token_ids) // block_size),
        block_size=block_size,
        num_slots=1,
        dtype=model.dtype,
        device=CPU,
    )
    return model.forward(whole_input(token_ids, block_size), state, len(token_ids) - 1)


def engine_for(
    model: Decoder, *, num_blocks: int, block_size: int, parts: Mapping[str, Any] | None = None, **sizes: Any
) -> Engine:
    """An engine with a pool of exactly ``num_blocks`` blocks; it admits without foresight, so as to preempt.

    ``parts`` are the arguments of ``Engine`` that are no sizes, and those of its ``ModelRunner``.
    """
    block_bytes = model.config.kv_block_bytes(block_size, model.dtype.itemsize, sizes.get("kv_cache_dtype", "auto"))
    sizes.setdefault("forecast_memory", False)
    config = EngineConfig(block_size=block_size, kv_cache_memory=num_blocks * block_bytes, **sizes)
    parts = dict(parts or {})
    runner = {name: parts.pop(name) for name in ("overlaps", "fetch") if name in parts}
    return Engine(model, config, **parts, runner=partial(ModelRunner, **runner))


def checked_run(engine: Engine, requests: Iterable[Request]) -> Iterator[Result]:
    """``engine.run`` with the invariants of scheduler and pool asserted before every step and at the end."""
    step = engine.step

    def checked() -> list[Result]:
        engine.scheduler.check()
        return step()

    engine.step = checked  # type: ignore[method-assign]
    yield from engine.run(requests)
    engine.scheduler.check()


def tokens_of(results: Iterable[Result]) -> dict[int, tuple[int, ...]]:
    """Generated tokens by request key; every key once and no error."""
    tokens: dict[int, tuple[int, ...]] = {}
    for result in results:
        assert result.error is None, result.error
        assert result.key not in tokens, f"request {result.key} was answered twice"
        tokens[result.key] = result.first.token_ids
    return tokens


def solo(model: Decoder, requests: Iterable[Request], kv_cache_dtype: str = "auto") -> dict[int, tuple[int, ...]]:
    """Tokens of every request run by itself, each in an engine of its own, prompt in one piece."""
    tokens = {}
    for request in requests:
        total = len(request.prompt_token_ids) + request.params.max_tokens
        engine = engine_for(
            model,
            num_blocks=-(-total // 32),
            block_size=32,
            max_num_seqs=1,
            max_num_batched_tokens=total,
            kv_cache_dtype=kv_cache_dtype,
        )
        tokens.update(tokens_of(engine.run([request])))
    return tokens


def random_requests(
    count: int,
    *,
    seed: int,
    prompt: tuple[int, int] = (1, 40),
    output: tuple[int, int] = (1, 24),
    params: SamplingParams | None = None,
    vocab_size: int = 128,
) -> list[Request]:
    """``count`` requests with prompt and output lengths uniform in the given ranges; end tokens are honoured."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    return [
        Request(
            key,
            tuple(torch.randint(8, vocab_size, (number(*prompt),), generator=generator).tolist()),
            replace(params or SamplingParams(), max_tokens=number(*output)),
        )
        for key in range(count)
    ]


def ragged_input(
    pieces: Sequence[tuple[int, int]], block_size: int, seed: int = 0, spare_blocks: int = 2, *, is_causal: bool = True
) -> tuple[ModelInput, int]:
    """Inputs for sequences given as (tokens cached, tokens of this step), and how many blocks they refer into.

    Blocks are dealt in random order, ``spare_blocks`` are left free; sequence i has conv slot i.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(past + count) // block_size) for past, count in pieces]
    num_blocks = sum(needed) + spare_blocks
    deck = torch.randperm(num_blocks, generator=generator).tolist()
    entries = []
    for slot, ((past, count), blocks) in enumerate(zip(pieces, needed, strict=True)):
        tokens = torch.randint(8, 128, (past + count,), generator=generator).tolist()
        entries.append((sequence_at(tokens, past, [deck.pop() for _ in range(blocks)], slot, key=slot), count))
    return build_input(Schedule(dict(entries)), block_size, is_causal=is_causal), num_blocks
