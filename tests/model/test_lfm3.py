"""What LFM3 alone has, beside the comparison of ``test_families``: its released config, frequencies and layers."""

from __future__ import annotations

import copy

import torch
from families import raw_config

from batchgen.model.registry import dummy_config, parse_config
from batchgen.model.rope import frequencies


def test_the_half_rotation_that_the_released_config_calls_default_is_the_proportional_one() -> None:
    raw = copy.deepcopy(raw_config("lfm3"))
    expected = parse_config(raw_config("lfm3"), "config.json")
    raw["rope_parameters"]["full_attention"]["rope_type"] = "default"
    for name in ("use_attention_gate", "use_sandwich_norm"):  # which it leaves out
        raw.pop(name, None)
    assert parse_config(raw, "config.json") == expected
    del raw["rope_parameters"]
    assert parse_config(raw, "config.json") == expected, "both libraries take these for the default"


def test_rotary_frequencies_have_the_bits_of_transformers() -> None:
    from transformers import AutoConfig
    from transformers.models.lfm3.modeling_lfm3 import Lfm3RotaryEmbedding

    config = dummy_config("dummy:LFM3-1.7B")
    full, sliding = config.layers[2].rope, config.layers[4].rope
    assert full
    assert sliding
    expected = Lfm3RotaryEmbedding(AutoConfig.for_model("lfm3"))
    assert torch.equal(frequencies(sliding, 128), expected.sliding_attention_inv_freq)
    assert torch.equal(frequencies(full, 128), expected.full_attention_inv_freq)
    assert expected.full_attention_inv_freq.count_nonzero() == 32


def test_the_published_shape_has_its_layers() -> None:
    config = dummy_config("dummy:LFM3-1.7B")
    windows = {i: layer.window for i, layer in enumerate(config.layers) if layer.rope}
    assert windows == dict.fromkeys((2, 6, 10, 14, 18, 22), 0) | dict.fromkeys((4, 8, 12, 16, 20), 256)
    assert config.num_conv_layers == 13
    assert config.kv_position_bytes(2) == 22_528
