"""Every model family against transformers' own model of it: float32, random weights, saved by ``save_pretrained``.

Only whole prefixes are computed by transformers, uncached. Here they are computed whole, in ragged batches of chunks,
and behind a cached prefix.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import RAW, raw_config, saved_by_transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_kernels import ReferenceKernels
from repeats import further, slow
from tiny_model import BACK_ENDS, CPU, DTYPES, prefix_logits
from torch import Tensor

from batchgen.core.errors import ModelError
from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.kernels.interface import Linear, PlainLinear
from batchgen.model.config import NO_ROPE
from batchgen.model.decoder import Decoder
from batchgen.model.families import FAMILIES
from batchgen.model.registry import dummy_config, parse_config, read_config
from batchgen.model.rope import frequencies
from batchgen.model.weights import Checkpoint, Init, NamedTensors, RandomTensors

LENGTHS = (1, 2, 5, 33, 300)  # 300 crosses the CPU kernel's tile of 256 positions
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 40}
BIASED = ("granite", "granitemoehybrid", "llama", "qwen3", "qwen3_moe", "smollm3")
# Other shapes, most of LFM2, whose convolutions and feed-forward widths no other family has.
VARIANTS: dict[str, dict[str, Any]] = {
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
    "lfm3 without norms behind a layer": {"model_type": "lfm3", "use_sandwich_norm": False},
    "lfm3 without gates": {"model_type": "lfm3", "use_attention_gate": False},
    "no bias, lfm2_moe": {"model_type": "lfm2_moe", "use_expert_bias": False},
    "as chosen, lfm2_moe": {"model_type": "lfm2_moe", "norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "no dense layer, lfm2_moe": {"model_type": "lfm2_moe", "num_dense_layers": 0},
    "all experts, lfm2_moe": {"model_type": "lfm2_moe", "num_experts_per_tok": 6},
    "gemma3_text as older files have it": {
        "model_type": "gemma3_text",
        "rope_parameters": None,
        **{"rope_theta": 1e5, "rope_local_base_freq": 1e3, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        **{"layer_types": None, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256, "head_dim": 16},
    },
    "yarn, qwen3": {"model_type": "qwen3", "rope_scaling": YARN},
    "yarn, granite": {"model_type": "granite", "rope_scaling": YARN, "head_dim": 32},
    "granite, tied": {"model_type": "granite", "embedding_multiplier": 12, "tie_word_embeddings": True},
    **{f"biased attention, {name}": {"model_type": name, "attention_bias": True} for name in BIASED},
    "without rotation, granitemoehybrid": {"model_type": "granitemoehybrid", "position_embedding_type": "nope"},
    "listed layers without rotation, smollm3": {"model_type": "smollm3", "no_rope_layers": [0, 1, 1, 0]},
    "as chosen, qwen3_moe": {"model_type": "qwen3_moe", "norm_topk_prob": False},
}


class Pair(NamedTuple):
    """The reference's model and the folder it was saved to."""

    reference: Any
    folder: Path

    def model(self, back_end: str, dtype: torch.dtype = torch.float32) -> Decoder:
        return Decoder(read_config(self.folder), Checkpoint(self.folder, dtype, CPU), BACK_ENDS[back_end]())

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> Tensor:
        return self.reference(torch.tensor([token_ids]), use_cache=False).logits[0]


def saved(name: str, folder: Path) -> Pair:
    """One of ``RAW``, ``VARIANTS`` or ``SHAPES``."""
    raw = dict(SHAPES[name]) if name in SHAPES else raw_config(*[name] * (name in RAW), **VARIANTS.get(name, {}))
    return Pair(saved_by_transformers(raw, folder, seed=len(name)), folder)


SHOWN = ("lfm2", "lfm2_moe", "lfm3", "gemma3_text", "ministral3")  # convolutions, experts, windows, scaled rotation


@pytest.fixture(scope="module", params=[name if name in SHOWN else further(name) for name in RAW])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return saved(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=[*RAW, *VARIANTS])
def any_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return saved(request.param, tmp_path_factory.mktemp("any"))


SHAPES = {name: raw for family in FAMILIES.values() for name, raw in family.shapes.items()}


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(8, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_every_family_is_tested() -> None:
    assert RAW.keys() == FAMILIES.keys()


def check_logits(pair: Pair, back_end: str, lengths: tuple[int, ...], most: float) -> None:
    model = pair.model(back_end)
    for length in lengths:
        token_ids = prompt(length, length)
        expected = pair.logits(token_ids)
        assert (prefix_logits(model, token_ids) - expected).abs().max() <= most * expected.abs().max()


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_logits_equal_those_of_transformers(any_pair: Pair, back_end: str) -> None:
    check_logits(any_pair, back_end, LENGTHS, 2e-5)


@pytest.mark.parametrize("family", [name if name in SHOWN else further(name) for name in RAW])
def test_a_head_of_its_own_under_a_config_that_says_tied_is_used_as_by_transformers(
    family: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    saved_by_transformers(raw_config(family) | {"tie_embedding": False, "tie_word_embeddings": False}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_embedding", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    load: Any = AutoModelForCausalLM.from_pretrained  # has no annotations
    pair = Pair(load(tmp_path, dtype=torch.float32, attn_implementation="eager").eval(), tmp_path)
    assert pair.reference.lm_head.weight is not pair.reference.get_input_embeddings().weight
    check_logits(pair, "cpu", (5,), 2e-5)


@pytest.mark.slow
def test_the_published_350m_shape_equals_transformers(tmp_path: Path) -> None:
    check_logits(saved("LFM2-350M", tmp_path), "cpu", (1, 40, 300), 1e-4)


@pytest.mark.parametrize("any_pair", [n for n in (*RAW, *VARIANTS) if not n.endswith("_moe")], indirect=True)
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_bfloat16_stays_within_its_rounding_of_float32(any_pair: Pair, back_end: str) -> None:
    """No equality to hold it against; a wrong cast or a float32 step lost would show as a larger gap.

    Not of mixtures, whose routers choose other experts where two are nearly as good.
    """
    wide, narrow = (prefix_logits(any_pair.model(back_end, dtype), prompt(50, 50)) for dtype in DTYPES.values())
    assert (narrow.float() - wide).square().mean().sqrt() <= 0.06 * wide.square().mean().sqrt()


def test_greedy_tokens_of_ragged_chunks_behind_cached_prefixes_equal_those_of_transformers(pair: Pair) -> None:
    shared = prompt(40, 1)
    prompts = [shared[: 8 * (i % 5)] + prompt(1 + 7 * i % 30, i) for i in range(20)]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    config = EngineConfig(
        kv_cache_memory=1 << 22, max_num_batched_tokens=37, max_num_seqs=9, block_size=8, prefix_caching=True
    )
    engine = Engine(pair.model("cpu"), config)
    results = list(engine.run(Request(key, tuple(prompt), params) for key, prompt in enumerate(prompts)))
    assert len(results) == 20
    assert engine.stats.num_cached_tokens > 0
    for result in results:
        tokens = prompts[result.key] + list(result.first.token_ids)
        greedy = pair.logits(tokens)[len(prompts[result.key]) - 1 : -1].argmax(-1)
        assert list(result.first.token_ids) == greedy.tolist()


FIRST = {next(iter(family.shapes)) for family in FAMILIES.values()} - {"Qwen3-30B-A3B"}  # which is the dearest


@pytest.mark.parametrize("name", [name if name in FIRST else slow(name) for name in SHAPES])
def test_published_shapes_have_the_parameters_that_transformers_gives_them(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    source = CountedTensors()
    config = parse_config(SHAPES[name], name)
    layers = {"layer_types": list(config.layer_types)} if config.num_conv_layers else {}
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**layers | dict(SHAPES[name])))
    num_tables = 1 if config.tie_embedding or not config.has_head else 2
    linears = config.linear_params + config.vocab_size * config.hidden_size * num_tables
    Decoder(config, source, NoKernels())
    saved = reference.state_dict().keys()
    biases = [buffer for name, buffer in reference.named_buffers() if name in saved]  # of routers
    assert source.num_parameters == sum(parameter.numel() for parameter in [*reference.parameters(), *biases])
    assert 0 < source.num_parameters - linears < 0.001 * source.num_parameters  # norms and taps


@pytest.mark.parametrize("model_type", RAW)
def test_random_norms_are_near_one(model_type: str) -> None:
    """Wider ones make the last bits of deep models differ more than ``batchgen check`` allows."""
    config = parse_config(raw_config(model_type), model_type)
    tensors = NamedTensors(RandomTensors(torch.float32, CPU), config)
    assert (tensors.norm("final_norm", 4096) - 1).abs().max() < 0.5


@pytest.mark.parametrize("interval", [{}, {"no_rope_layer_interval": 3}, {"no_rope_layer_interval": 1}])
def test_a_file_that_lists_no_layers_without_rotation_means_those_of_transformers(interval: dict[str, int]) -> None:
    from transformers import AutoConfig

    raw = raw_config("smollm3", num_hidden_layers=9)
    del raw["no_rope_layer_interval"]
    layers = parse_config(raw | interval, "smollm3").layers
    wanted: Any = AutoConfig.for_model(**raw | interval)
    assert [int(layer.rope != NO_ROPE) for layer in layers] == wanted.no_rope_layers


class CountedTensors(RandomTensors):
    """Tensors without memory, counted."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16, torch.device("meta"))
        self.num_parameters = 0

    def take(
        self, name: str, shape: tuple[int, ...], init: Init | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        self.num_parameters += math.prod(shape)
        return torch.empty(shape, device="meta")


class NoKernels(ReferenceKernels):
    """Kernels that keep no weights."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return PlainLinear(torch.empty(0), None)


def full_attention(**rope: Any) -> dict[str, Any]:
    return {"rope_parameters": {**RAW["lfm3"]["rope_parameters"], "full_attention": rope}}


def scaled(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": {**RAW["llama"]["rope_scaling"], **changes}}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gemma3_text", {"hidden_activation": "silu"}, ["hidden_activation is 'silu'; only 'gelu_pytorch_tanh' is"]),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping is 30.0; it is not computed"]),
        ("gemma3_text", {"use_bidirectional_attention": "yes"}, ["use_bidirectional_attention must be true or false"]),
        ("gemma3_text", {"sliding_window": None}, ["sliding_window"]),
        ("gemma3_text", {"layer_types": ["conv"] * 4}, ["layer_types must name 4 layers as 'sliding_attention' or"]),
        ("granite", {"residual_multiplier": 0}, ["residual_multiplier must be a positive number"]),
        ("granite", {"attention_multiplier": 1e-4}, ["attention_multiplier must be from 0.001 to 1000, not 0.0001"]),
        ("granitemoehybrid", {"layer_types": ["attention", "mamba", "attention"]}, ["layers of Mamba are not"]),
        ("granitemoehybrid", {"layer_types": None}, ["layers of Mamba are not computed here"]),
        ("granitemoehybrid", {"layer_types": ["attention"] * 2}, ["layer_types must name 3 layers"]),
        ("granitemoehybrid", {"num_local_experts": 8}, ["num_local_experts is not 0; experts next to"]),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, ["position_embedding_type is 'alibi'; known are"]),
        ("llama", {"mlp_bias": True}, ["mlp_bias true is not computed here"]),
        ("mistral", {"attention_bias": True}, ["attention_bias true is not computed here"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ("llama", {"intermediate_size": None}, ["intermediate_size"]),
        ("llama", {"num_hidden_layers": 10**6}, ["num_hidden_layers", "128"]),
        ("llama", scaled(factor=0), ["rope_scaling", "factor", "0"]),
        ("llama", scaled(high_freq_factor=1.0), ["low_freq_factor", "high_freq_factor"]),
        ("llama", scaled(original_max_position_embeddings=None), ["original_max_position_embeddings"]),
        ("llama", scaled(rope_type="longrope"), ["rope", "'longrope'", "llama3"]),
        ("lfm2", {"is_causal": False}, ["conv_L_cache is 3; is_causal false with convolutions is not supported"]),
        ("lfm2_moe", {"num_experts_per_tok": 7}, ["num_experts_per_tok must be at most 6"]),
        ("lfm2_moe", {"num_experts": 0}, ["num_experts must be a positive integer"]),
        ("lfm2_moe", {"num_dense_layers": -1}, ["num_dense_layers must be an integer from 0 up"]),
        ("lfm2_moe", {"num_shared_experts": 1}, ["num_shared_experts is 1; experts that every token meets"]),
        ("lfm2_moe", {"norm_topk_prob": "yes"}, ["norm_topk_prob must be true or false"]),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, ["shared_expert_intermediate_size is 64"]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, ["decoder_sparse_step is 2; only models with experts in every"]),
        ("qwen3_moe", {"mlp_only_layers": [0]}, ["mlp_only_layers is [0]; only models with experts in every layer"]),
        ("qwen3_moe", {"moe_intermediate_size": None}, ["has no 'moe_intermediate_size'"]),
        ("lfm3", {"attention_bias": True}, ["attention_bias"]),
        ("lfm3", {"sliding_window": None}, ["sliding_window"]),
        ("lfm3", {"layer_types": ["conv"] * 5 + ["linear_attention"]}, ["layer_types"]),
        ("lfm3", {"layer_types": ["conv"] * 5}, ["layer_types"]),
        ("lfm3", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, ["full_attention"]),
        ("lfm3", full_attention(rope_type="longrope"), ["longrope"]),
        ("lfm3", full_attention(partial_rotary_factor=2), ["partial_rotary_factor"]),
        ("mistral", {"sliding_window": 4095}, ["sliding_window"]),
        ("qwen3", {"use_sliding_window": True}, ["use_sliding_window"]),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, ["layer_types must name 3 layers as 'full_attention'"]),
        ("smollm3", {"layer_types": ["sliding_attention"] * 4}, ["layer_types must name 4 layers as"]),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}, ["no_rope_layers must have 1 or 0 for each of 4 layers"]),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 2]}, ["no_rope_layers must have 1 or 0 for each of 4 layers"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_a_family_lacks_is_refused_by_name(family: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config(raw_config(family, **changes), "config.json")
    assert all(word in str(caught.value) for word in ["config.json", *words]), str(caught.value)
    assert "\n" not in str(caught.value)


# Of all families, whether or not one has them.
KEYS = {key for raw in RAW.values() for key in raw} | {
    *("intermediate_size", "layer_types", "head_dim", "norm_eps", "rope_theta", "rope_parameters", "rope_scaling"),
    *("tie_embedding", "tie_word_embeddings", "dtype", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim"),
}
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2**40), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("family", RAW)
def test_any_json_in_a_config_is_either_understood_or_refused_in_one_line(family: str, data: st.DataObject) -> None:
    keys = st.sampled_from(sorted(KEYS - {"model_type"})) | st.sampled_from(sorted(RAW[family].keys() - {"model_type"}))
    changes = data.draw(st.dictionaries(keys, VALUES, max_size=4))
    try:
        config = parse_config(raw_config(family, **changes), "config.json")
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert len(config.layer_types) == config.num_layers > 0
        assert config.linear_params >= config.linear_params_per_token > 0


# ---------------------------------------------------------------- what LFM3 alone has


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
