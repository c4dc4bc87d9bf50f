"""Every model family against transformers' own model of it: float32, random weights, saved by ``save_pretrained``.

Only whole prefixes are computed by transformers, uncached. Here they are computed whole, in ragged batches of chunks,
and behind a cached prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import RAW, raw_config, saved_by_transformers
from tiny_model import BACK_ENDS, CPU, prefix_logits
from torch import Tensor

from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.model.decoder import Decoder
from batchgen.model.registry import FAMILIES, read_config
from batchgen.model.weights import Checkpoint

LENGTHS = (1, 2, 5, 33, 300)  # 300 crosses the CPU kernel's tile of 256 positions


class Pair(NamedTuple):
    """The reference's model and the folder it was saved to."""

    reference: Any
    folder: Path

    def model(self, back_end: str, dtype: torch.dtype = torch.float32) -> Decoder:
        return Decoder(read_config(self.folder), Checkpoint(self.folder, dtype, CPU), BACK_ENDS[back_end]())

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> Tensor:
        return self.reference(torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=RAW)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    yield Pair(saved_by_transformers(raw_config(request.param), folder), folder)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(8, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_every_family_is_tested() -> None:
    assert RAW.keys() == FAMILIES.keys()


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_logits_equal_those_of_transformers(pair: Pair, back_end: str) -> None:
    model = pair.model(back_end)
    for length in LENGTHS:
        expected = pair.logits(prompt(length, length))
        assert (prefix_logits(model, prompt(length, length)) - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_greedy_tokens_of_ragged_chunks_behind_cached_prefixes_equal_those_of_transformers(pair: Pair) -> None:
    shared = prompt(40, 1)
    prompts = [shared[: 8 * (i % 5)] + prompt(1 + 7 * i % 30, i) for i in range(50)]
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    config = EngineConfig(
        kv_memory=1 << 22, max_num_batched_tokens=37, max_num_seqs=9, block_size=8, prefix_caching=True
    )
    engine = Engine(pair.model("cpu"), config)
    results = list(engine.run(Request(key, tuple(prompt), params) for key, prompt in enumerate(prompts)))
    assert len(results) == 50
    assert engine.stats.num_cached_tokens > 0
    for result in results:
        tokens = prompts[result.key] + list(result.token_ids)
        greedy = pair.logits(tokens)[len(prompts[result.key]) - 1 : -1].argmax(-1)
        assert list(result.token_ids) == greedy.tolist()
