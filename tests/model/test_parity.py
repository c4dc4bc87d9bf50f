"""The forward pass against transformers' ``Lfm2ForCausalLM``: float32, random weights, unpadded, uncached.

Only whole prefixes are compared: transformers' own cached forward of LFM2 was once wrong (issue 42017 of that project).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import raw_config, reference_model
from safetensors.torch import save_file
from tiny_model import BACK_ENDS, CPU, DTYPES, prefix_logits
from torch import Tensor

from batchgen.model.decoder import Decoder
from batchgen.model.families import lfm2
from batchgen.model.registry import read_config
from batchgen.model.weights import Checkpoint

LENGTHS = (1, 2, 5, 33, 300)  # 300 crosses the CPU kernel's tile of 256 positions
SHAPES: dict[str, dict[str, Any]] = {
    "3 heads of 16": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
    "5 heads of 8, width 40": {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 5},
    "all attention, 4 heads of 24 on 1": {
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "full_attn_idxs": [0, 1, 2, 3],
    },
    "6 heads of 64 on 2, width 60": {
        "hidden_size": 60,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "all conv but one, L_cache 4": {"num_hidden_layers": 5, "full_attn_idxs": [2], "conv_L_cache": 4},
    "no width adjustment": {"block_auto_adjust_ff_dim": False, "block_ff_dim": 100},
    "biased conv, L_cache 4": {"conv_bias": True, "conv_L_cache": 4},
    "untied head": {"tie_embedding": False, "vocab_size": 131},
    "width 36, 3 heads of 12": {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1},
    "adjusted by 1.3 to 7s, theta 1e4": {
        "block_ffn_dim_multiplier": 1.3,
        "block_multiple_of": 7,
        "rope_theta": 1e4,
        "norm_eps": 1e-3,
    },
    "12 heads on 1, L_cache 2": {
        "hidden_size": 96,
        "num_attention_heads": 12,
        "num_key_value_heads": 1,
        "conv_L_cache": 2,
    },
}


def save(model: Any, raw: dict[str, Any], folder: Path) -> None:
    """The model as a Hub checkpoint: a ``config.json`` with the Hub's keys, no head where it is tied."""
    weights = {name: t.contiguous() for name, t in model.state_dict().items()}
    if raw.get("tie_embedding", True):
        del weights["lm_head.weight"]
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(weights, folder / "model.safetensors")


@torch.no_grad()
def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def load(folder: Path, back_end: str) -> Decoder:
    return Decoder(read_config(folder), Checkpoint(folder, torch.float32, CPU), BACK_ENDS[back_end]())


def prompt(length: int, seed: int, vocab_size: int) -> list[int]:
    return torch.randint(8, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A reference model and the folder of its checkpoint."""
    raw = raw_config(**SHAPES[request.param])
    folder = tmp_path_factory.mktemp("parity")
    model = reference_model(raw, seed=len(request.param))
    save(model, raw, folder)
    yield model, folder


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_logits_equal_those_of_transformers(pair: tuple[Any, Path], back_end: str) -> None:
    reference, folder = pair
    model = load(folder, back_end)
    for length in LENGTHS:
        token_ids = prompt(length, length, model.config.vocab_size)
        expected = reference_logits(reference, token_ids)
        got = prefix_logits(model, token_ids)
        assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_checkpoint_saved_by_transformers_is_loaded_as_it_is(pair: tuple[Any, Path], tmp_path: Path) -> None:
    reference, folder = pair
    reference.save_pretrained(tmp_path)
    saved, own = read_config(tmp_path), read_config(folder)
    token_ids = prompt(7, 7, own.vocab_size)
    theirs = Decoder(saved, Checkpoint(tmp_path, torch.float32, CPU), BACK_ENDS["cpu"]())
    assert torch.equal(prefix_logits(theirs, token_ids), prefix_logits(load(folder, "cpu"), token_ids))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_bfloat16_stays_within_its_rounding_of_float32(pair: tuple[Any, Path], back_end: str) -> None:
    """No equality to hold it against; a wrong cast or a float32 step lost would show as a larger gap."""
    _, folder = pair
    config = read_config(folder)
    token_ids = prompt(50, 50, config.vocab_size)
    logits = {
        name: prefix_logits(Decoder(config, Checkpoint(folder, dtype, CPU), BACK_ENDS[back_end]()), token_ids).float()
        for name, dtype in DTYPES.items()
    }
    gap = (logits["bfloat16"] - logits["float32"]).square().mean().sqrt()
    assert gap <= 0.06 * logits["float32"].square().mean().sqrt()


@pytest.mark.slow
def test_the_published_350m_shape_equals_transformers(tmp_path: Path) -> None:
    raw = dict(lfm2.SHAPES["LFM2-350M"])
    reference = reference_model(raw)
    save(reference, raw, tmp_path)
    model = load(tmp_path, "cpu")
    for length in (1, 40, 300):
        token_ids = prompt(length, length, model.config.vocab_size)
        expected = reference_logits(reference, token_ids)
        assert (prefix_logits(model, token_ids) - expected).abs().max() <= 1e-4 * expected.abs().max()
