"""GGUF files: the model they hold is the one that the package which defines them reads, or they are refused."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import gguf_name, rope_factors, write_gguf
from reference_kernels import ReferenceKernels
from repeats import slow
from run_helpers import MODEL, JobMaker, rows_of, smollm2
from safetensors.torch import load_file, save_file
from tiny_model import CPU, DTYPES, prefix_logits, raw_config, write_checkpoint

import batchgen
from batchgen.core.errors import ExitCode, ModelError
from batchgen.core.file_digests import Digests
from batchgen.core.gguf import read_header
from batchgen.core.machine import QUANTIZATIONS
from batchgen.model.decoder import Decoder
from batchgen.model.gguf.config import holds_float16
from batchgen.model.gguf.tensors import GgufTensors
from batchgen.model.load import load_model
from batchgen.model.registry import load_config, parse_config, read_config
from batchgen.model.vector_files import VectorFiles, read_vector_files
from batchgen.run.invocation import RunOptions
from batchgen.run.job import run_job
from batchgen.run.loader import read_model
from batchgen.text.gguf_tokenizer import read_gguf_tokenizer

PROMPT = [9, 30, 77, 12, 5]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "llama": {
        "model_type": "llama",
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},  # of its longest wavelengths, and of some
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"intermediate_size": 96, "hidden_size": 64, "moe_intermediate_size": 64},
    "granite": {"model_type": "granite"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 24,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    },
}
SCALES = {"embedding_scale": 3.0, "residual_scale": 0.22, "attention.scale": 0.1, "logit_scale": 6.0}
SCALES |= {"attention.layer_norm_rms_epsilon": 1e-5}
ARCHITECTURES = {"lfm2moe": "lfm2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
ARCHITECTURES |= {name: name for name in ("llama", "granite", "qwen2")}
METADATA = {"granite": {f"granite.{key}": value for key, value in SCALES.items()}}
Kind = gguf.GGMLQuantizationType
BLOCKS = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.BF16, Kind.F16, Kind.F32]
NOT_READ = [Kind.Q8_1, Kind.Q8_K, Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.Q1_0, Kind.F64]


def load(path: Path, dtype: str = "float32") -> Decoder:
    return load_model(str(path), dtype=dtype, device="cpu", kernels=ReferenceKernels())


def refusal(path: Path) -> str:
    """The one line with which loading the file fails."""
    with pytest.raises(ModelError) as caught:
        load(path)
    message = str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in message and len(message) < 500
    assert message.startswith(str(path))
    return message


def mostly(kind: Any) -> Callable[[str], Any]:
    """Matrices of that type; norms and convolutions float32, as converters leave them."""
    small = ("norm", "conv.conv", "bias", "gate.weight")
    return lambda name: Kind.F32 if any(part in name for part in small) else kind


def write_both(folder: Path, kind: Any, metadata: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A GGUF file, and ``plain`` with the values that it stands for."""
    tensors = write_checkpoint(folder / "plain", **changes)
    config = read_config(folder / "plain")
    values = write_gguf(folder / "tiny.gguf", config, tensors, mostly(kind), metadata)
    plain = {name: torch.from_numpy(np.ascontiguousarray(value)).float() for name, value in values.items()}
    save_file(plain, folder / "plain" / "model.safetensors")
    return folder / "tiny.gguf"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["lfm2", "llama", "qwen3"])
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_a_gguf_model_has_the_logits_of_the_values_that_it_stands_for(
    tmp_path: Path, kind: Any, family: str, dtype: str
) -> None:
    found, expected = load(write_both(tmp_path, kind, **FAMILIES[family]), dtype), load(tmp_path / "plain", dtype)
    assert torch.equal(prefix_logits(found, PROMPT), prefix_logits(expected, PROMPT))


@pytest.mark.parametrize("family", MORE_FAMILIES)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_gguf_model_of_another_family_has_the_logits_of_its_values(tmp_path: Path, kind: Any, family: str) -> None:
    changes = {"model_type": family, **MORE_FAMILIES[family]}
    path = write_both(tmp_path, kind, METADATA.get(family), **changes)
    found, expected = prefix_logits(load(path), PROMPT), prefix_logits(load(tmp_path / "plain"), PROMPT)
    if family == "gemma3_text":  # its file has 1 added to norms, and rounds the sum
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_q8_0_are_kept_as_integers_without_a_second_rounding(tmp_path: Path, family: str, dtype: str) -> None:
    def logits(path: Path, kernels: type[ReferenceKernels] | None, quantization: str = "none") -> torch.Tensor:
        made = kernels and kernels(weights=QUANTIZATIONS[quantization][0])
        model = load_model(str(path), dtype=dtype, device="cpu", kernels=made, quantization=quantization)
        assert model.embedding(torch.tensor([3])).dtype == DTYPES[dtype]
        return prefix_logits(model, PROMPT)

    path = write_both(tmp_path, Kind.Q8_0, **FAMILIES[family])
    for kernels in (ReferenceKernels, None):
        assert torch.equal(logits(path, kernels, "w8a16"), logits(path, kernels))
    path = write_both(tmp_path / "other", Kind.Q5_0, **FAMILIES[family])
    assert not torch.equal(logits(path, None, "w8a16"), logits(path, None))


@pytest.mark.parametrize("family", FAMILIES)
def test_integers_that_meet_integers_are_those_of_the_values_that_blocks_of_q8_0_stand_for(
    tmp_path: Path, family: str
) -> None:
    """Not of their own integers, whose groups are others and not rotated, nor of values that were rounded before."""
    path, settings = write_both(tmp_path, Kind.Q8_0, **FAMILIES[family]), {"weights": "int8", "activations": "int8"}
    for kernels in (ReferenceKernels, None):
        found, expected = (
            prefix_logits(
                load_model(
                    str(place),
                    dtype="float32",
                    device="cpu",
                    quantization="w8a8",
                    kernels=kernels(**settings) if kernels else None,
                ),
                PROMPT,
            )
            for place in (path, tmp_path / "plain")
        )
        assert torch.equal(found, expected)
        assert not torch.equal(found, prefix_logits(load(path), PROMPT))


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"tie_embedding": False}, {"head_dim": 32}, {"rope_theta": 5e5}),
        *(FAMILIES["llama"], FAMILIES["llama"] | {"head_dim": 32}, FAMILIES["llama"] | {"rope_scaling": None}),
        *(FAMILIES["qwen3"], FAMILIES["qwen3"] | {"head_dim": 16, "rope_theta": 1e6}),
    ],
    ids=str,
)
def test_the_config_is_that_of_the_model_it_was_converted_from(tmp_path: Path, changes: dict[str, Any]) -> None:
    metadata = {"lfm2.attention.key_length": changes.get("head_dim")} if "model_type" not in changes else {}
    path = write_both(tmp_path, Kind.F16, metadata, **changes)
    expected_config = parse_config(raw_config(**changes, torch_dtype="bfloat16"), "tiny")
    assert load_config(str(path)) == replace(expected_config, is_gguf=True)
    found, expected = load(path), load(tmp_path / "plain")
    assert torch.equal(prefix_logits(found, PROMPT), prefix_logits(expected, PROMPT))


def test_the_last_norm_may_have_its_newer_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"model.embedding_norm.weight": "output_norm.weight"}
    monkeypatch.setattr("gguf_files.gguf_name", lambda name, *of: names.get(name) or gguf_name(name, *of))
    path = write_both(tmp_path, Kind.F32)
    assert "output_norm.weight" in read_header(path).tensors
    assert torch.equal(prefix_logits(load(path), PROMPT), prefix_logits(load(tmp_path / "plain"), PROMPT))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_model_from_the_same_file(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    changes = FAMILIES[family] | ({"rope_scaling": None} if family == "llama" else {})  # which it passes over
    changes |= {"head_dim": 128} if family == "qwen3" else {}  # which it takes for granted
    path = write_both(tmp_path, Kind.Q8_0, **changes)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(prefix_logits(load(path), PROMPT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"factor": 32.0, "rope_theta": 5e5, "head_dim": 64}], ids=str)
def test_rope_factors_that_are_those_of_llama3_tell_its_scaling(tmp_path: Path, changes: dict[str, Any]) -> None:
    scaling = FAMILIES["llama"]["rope_scaling"] | {"factor": changes.get("factor", 8.0)}
    more = {name: value for name, value in changes.items() if name != "factor"}
    path = write_both(tmp_path, Kind.F16, **FAMILIES["llama"] | {"rope_scaling": scaling} | more)
    (found,) = load_config(str(path)).ropes
    (expected,) = read_config(tmp_path / "plain").ropes
    assert replace(found, factor=round(found.factor, 3)) == expected


@pytest.mark.parametrize("changed", [{3: 1.5}, {-1: 9.0}, {0: float("nan")}, {-1: 0.0}, {-1: float("inf")}], ids=str)
def test_other_rope_factors_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[int, float]
) -> None:
    def factors(rope: Any, head_dim: int) -> torch.Tensor:
        found = rope_factors(rope, head_dim)
        for index, factor in changed.items():
            found[index] = factor
        return found

    monkeypatch.setattr("gguf_files.rope_factors", factors)
    words = "rope_freqs.weight has not the factors of Llama 3's rotary embedding; use safetensors"
    assert words in refusal(write_both(tmp_path, Kind.F16, **FAMILIES["llama"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_that_says_so_looks_both_ways(tmp_path: Path, family: str) -> None:
    path = write_both(tmp_path, Kind.F32, {f"{family}.attention.causal": False}, **FAMILIES[family])
    config = read_config(path)
    assert not config.is_causal and not config.has_head


@pytest.mark.parametrize(
    ("number", "pooling", "normalizes", "is_there"),
    [(0, "tokens", False, False), (1, "mean", True, True), (2, "cls", True, True), (3, "last", True, True)],
)
def test_a_file_says_how_tokens_are_pooled(
    tmp_path: Path, number: int, pooling: str, normalizes: bool, is_there: bool
) -> None:
    files = read_vector_files(write_both(tmp_path, Kind.F32, {"lfm2.pooling_type": number}))
    assert (files.pooling, files.normalize, files.is_there) == (pooling, normalizes, is_there)


def test_a_file_without_a_pooling_type_says_nothing_of_vectors(tmp_path: Path) -> None:
    assert read_vector_files(write_both(tmp_path, Kind.F32)) == VectorFiles()


@pytest.mark.parametrize("number", [4, 9, "mean"])
def test_a_pooling_that_is_not_computed_is_refused(tmp_path: Path, number: object) -> None:
    with pytest.raises(ModelError, match=r"lfm2\.pooling_type is .*, which is not computed here"):
        read_vector_files(write_both(tmp_path, Kind.F32, {"lfm2.pooling_type": number}))


def one_tensor(path: Path, kind: Any, data: np.ndarray) -> GgufTensors:
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_tensor("x.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufTensors(path, torch.float32, CPU)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in NOT_READ], ids=lambda kind: kind.name)
def test_blocks_of_every_type_are_read_as_the_package_reads_them(tmp_path: Path, kind: Any) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, width = 700, 512 * -(-block // 256)  # more than one chunk
    data = np.random.default_rng(kind).integers(0, 60, (rows, width // block * size), dtype=np.uint8)  # finite scales
    source = one_tensor(tmp_path / "x.gguf", kind, data)
    assert np.array_equal(source.take("x.weight", (rows, width)).numpy(), gguf.dequantize(data, kind))
    source.finish()


@pytest.mark.parametrize("kind", [kind for kind in NOT_READ if kind != Kind.F64], ids=lambda kind: kind.name)
def test_a_type_that_the_package_does_not_turn_into_numbers_is_named(tmp_path: Path, kind: Any) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    source = one_tensor(tmp_path / "x.gguf", kind, np.zeros((2, size), dtype=np.uint8))
    with pytest.raises(ModelError, match=f"tensor 'x.weight' has type {kind.name}, which is not supported"):
        source.take("x.weight", (2, block))


def test_numbers_of_float64_are_read(tmp_path: Path) -> None:
    values = np.array([[0.5, -3.0]])
    assert one_tensor(tmp_path / "x.gguf", None, values).take("x.weight", (1, 2)).tolist() == [[0.5, -3.0]]


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    data = gguf.quantize(np.ones((2, 32), dtype=np.float32), Kind.Q8_0)
    data[1, :2] = 0, 0x7E  # a NaN of float16
    with pytest.raises(ModelError, match=r"'x.weight' has values that are not finite"):
        one_tensor(tmp_path / "x.gguf", Kind.Q8_0, data).take("x.weight", (2, 32))


NOT_COMPUTED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "gemma2"}, "'gemma2'; GGUF files of 'lfm2', 'lfm2moe', 'llama', 'granite', 'qwen2'"),
    ({"general.architecture": None}, "general.architecture is None"),
    ({"split.count": 3}, "is one piece of several; join them"),
    ({"lfm2.attention.head_count_kv": 2}, "head_count_kv must be a list, not 2"),
    ({"lfm2.embedding_length": None}, "the metadata has no 'lfm2.embedding_length'"),
    ({"lfm2.embedding_length": 0}, "hidden_size must be a positive integer"),
    ({"lfm2.embedding_length": "64"}, "hidden_size must be a positive integer"),
    ({"lfm2.embedding_length": 128}, "tensor 'token_embd.weight' has shape [128, 64]; the metadata asks for [128,"),
    ({"lfm2.embedding_length": 2**31}, "hidden_size must be at most"),
    ({"lfm2.block_count": 5}, "layer_types must name 5 layers"),
    ({"lfm2.block_count": 2**31}, "num_hidden_layers must be at most"),
    ({"lfm2.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
    ({"lfm2.feed_forward_length": 2**31 - 2}, "take"),
    ({"general.alignment": 0}, "general.alignment is 0"),
    ({"general.alignment": "x"}, "general.alignment is 'x'"),
    ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
    ({"llama.rope.scaling.factor": 2.0}, "rope scaling 'linear' is not supported"),
    ({"llama.rope.scale_linear": 4.0}, "rope scaling 'linear' is not supported"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8 of 16 is not supported"),
    ({"llama.rope.scaling.original_context_length": "x"}, "has not the factors of Llama 3"),
    ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not computed here"),
    ({"llama.logit_scale": 0.5}, "llama.logit_scale is 0.5, which is not computed here"),
    ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0, which is not computed"),
    ({"llama.attention.head_count_kv": [2, 2, 1]}, "num_key_value_heads must be a positive integer"),
    ({"llama.attention.head_count": 5}, "num_attention_heads 5 is not a multiple of 2"),
    ({"llama.rope.freq_base": None}, "the metadata has no 'llama.rope.freq_base'"),
    ({"lfm2moe.expert_gating_func": 1}, "lfm2moe.expert_gating_func is 1, which is not computed here"),
    ({"lfm2moe.expert_count": None}, "the metadata has no 'lfm2moe.expert_count'"),
    ({"qwen3moe.expert_shared_count": 1}, "qwen3moe.expert_shared_count is 1, which is not computed"),
    ({"granite.rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned is False, which is not"),
    ({"gemma3.final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping is 30.0, which is"),
    ({"qwen2.attention.sliding_window": 64}, "qwen2.attention.sliding_window is 64, which is not computed"),
]


@pytest.mark.parametrize(("metadata", "words"), NOT_COMPUTED, ids=str)
def test_metadata_that_are_no_model_or_not_computed_are_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], words: str
) -> None:
    family = ARCHITECTURES.get(next(iter(metadata)).partition(".")[0], "lfm2")
    changes = FAMILIES.get(family) or {"model_type": family, **MORE_FAMILIES.get(family, {})}
    path = write_both(tmp_path, Kind.F16, METADATA.get(family, {}) | metadata, **changes)
    assert words in refusal(path)


def test_tensors_that_are_missing_or_left_over_are_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    config = read_config(tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    write_gguf(tmp_path / "less.gguf", config, {n: t for n, t in tensors.items() if n != name}, mostly(Kind.F16))
    assert "tensor 'blk.1.attn_q.weight' is missing" in refusal(tmp_path / "less.gguf")
    more = {name.replace("layers.1", "layers.0"): tensors[name]}
    write_gguf(tmp_path / "more.gguf", config, tensors | more, mostly(Kind.F16))
    assert "unknown tensor 'blk.0.attn_q.weight'" in refusal(tmp_path / "more.gguf")
    no_embedding = {n: t for n, t in tensors.items() if "embed_tokens" not in n}
    write_gguf(tmp_path / "none.gguf", config, no_embedding, mostly(Kind.F16))
    assert "has no tensor 'token_embd.weight'" in refusal(tmp_path / "none.gguf")


def header(num_tensors: int, num_values: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + rest


def value(kind: int, rest: bytes, key: bytes = b"k") -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + rest


def entry(name: bytes, *shape: int, kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape) if dimensions is None else dimensions, *shape)
    return struct.pack("<Q", len(name)) + name + sizes + struct.pack("<IQ", kind, offset)


HUGE = 2**64 - 1
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a usable GGUF file"),
    "a safetensors file": (struct.pack("<Q", 2) + b"{}" + bytes(50), "it does not begin with GGUF"),
    "another version": (header(0, 0, version=1), "version 1; 2 and 3 are read"),
    "the other byte order": (b"GGUF" + struct.pack(">I", 3), "version 50331648"),
    "values without end": (header(0, HUGE), "it claims 18,446,744,073,709,551,615 values"),
    "tensors that are not there": (header(9, 65536), "its header is cut short"),
    "a key without end": (header(0, 1, struct.pack("<Q", HUGE)), "its header is cut short"),
    "a text without end": (header(0, 1, value(8, struct.pack("<Q", 2**62))), "its header is cut short"),
    "an array without end": (header(0, 1, value(9, struct.pack("<IQ", 0, HUGE))), "its header is cut short"),
    "an array of texts without end": (header(0, 1, value(9, struct.pack("<IQ", 8, HUGE))), "its header is cut short"),
    "an array of arrays": (header(0, 1, value(9, struct.pack("<IQ", 9, 1))), "an array of type 9"),
    "a value of no type": (header(0, 1, value(13, b"")), "metadata of unknown type 13"),
    "a key that is no UTF-8": (header(0, 1, value(0, b"\0", b"\xff")), "not a usable GGUF file"),
    "dimensions without end": (header(1, 0, entry(b"t", dimensions=2**31)), "more than 4 dimensions"),
    "a tensor twice": (header(2, 0, entry(b"t", 1) + entry(b"t", 1)), "'t' is there twice"),
    "no metadata": (header(0, 0), "general.architecture is None"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_gguf_file_is_refused_in_one_line_and_little_memory(tmp_path: Path, name: str) -> None:
    content, words = HOSTILE[name]
    (tmp_path / "x.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        assert words in refusal(tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("count", "length"), [(2**31, 0), (2**40, 0), (2, 2**33)])
def test_a_header_of_texts_is_read_no_further_than_its_limit(tmp_path: Path, count: int, length: int) -> None:
    with (tmp_path / "x.gguf").open("wb") as file:
        file.write(header(0, 1, value(9, struct.pack("<IQQ", 8, count, length))))
        file.truncate(1 << 34)  # room for each of these texts, the first of a length and all others empty
    tracemalloc.start()
    try:
        assert "its header is cut short" in refusal(tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


ROWS = 2**40  # of numbers, 4 TB
BAD_TENSORS: list[tuple[bytes, tuple[int, int], str]] = [
    *(
        (entry(b"x", *shape[::-1]), (64, 128), r"tensor 'x' has shape \[")
        for shape in ((2**63, 2**63), (64, 2**40), (64,), (), (64, 128, 2))
    ),
    *(
        (entry(b"x", width, ROWS, kind=kind, offset=offset), (ROWS, width), "lies beyond the end of the file")
        for kind, width in ((0, 1), (8, 32), (12, 256))
        for offset in (1, 2**40, HUGE)
    ),
    (entry(b"x", 48, 2, kind=8), (2, 48), "rows of 48 values, Q8_0 blocks of 32"),
    (entry(b"x", 32, 2, kind=4), (2, 32), "has type 4, which the installed gguf package does not know"),
]


@pytest.mark.parametrize(("content", "shape", "words"), BAD_TENSORS, ids=str)
def test_a_tensor_that_cannot_be_read_is_refused_before_it_is_allocated(
    tmp_path: Path, content: bytes, shape: tuple[int, int], words: str
) -> None:
    (tmp_path / "x.gguf").write_bytes(header(1, 0, content) + bytes(999))
    with pytest.raises(ModelError, match=words):
        GgufTensors(tmp_path / "x.gguf", torch.float32, CPU).take("x", shape)


@pytest.mark.parametrize("seed", [5, *map(slow, range(6, 15))])  # 500 files in all
def test_a_file_that_is_cut_or_changed_anywhere_is_refused_or_runs(tmp_path: Path, seed: int) -> None:
    tokenizer = {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.merges": ["t o", "to k"]}
    tokens = {"tokenizer.ggml.tokens": [*"token 0123456789", "to", "tok", *(f"<{n}>" for n in range(110))]}
    family = FAMILIES[list(FAMILIES)[seed % 3]]
    whole = write_both(tmp_path, Kind.Q8_0, tokenizer | tokens, **family).read_bytes()
    end = whole.index(b"blk.2.ffn_norm.weight") + 100  # of the header, roughly
    rng = random.Random(seed)
    path, num_refused = tmp_path / "x.gguf", 0
    cut = [whole[: rng.randrange(len(whole))] for _ in range(10)]
    for _ in range(40):
        broken = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(min(end, len(whole)))] = rng.randrange(256)
        cut.append(bytes(broken))
    for content in cut:
        path.write_bytes(content)
        try:
            load(path)
            read_gguf_tokenizer(path)
        except ModelError as error:
            num_refused += 1
            assert "\n" not in str(error) and len(str(error)) < 500
    assert 10 <= num_refused < len(cut)


def write_sample(folder: Path, kind: Any) -> Path:
    """The sample model as a GGUF file, its tokenizer beside it."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    write_gguf(folder / "sample.gguf", read_config(MODEL), load_file(MODEL / "model.safetensors"), mostly(kind))
    return folder / "sample.gguf"


def test_a_job_on_a_gguf_file_writes_what_it_writes_on_the_folder(job: JobMaker, tmp_path: Path) -> None:
    path = write_sample(tmp_path / "model", Kind.BF16)
    job.write(rows_of(4))
    texts = {}
    for name, model in {"folder": MODEL, "file": path}.items():
        spec = job.spec(model={"path": str(model), "dtype": "float32"}, output={"path": str(tmp_path / name)})
        assert run_job(spec, RunOptions(progress="quiet")).exit_code == ExitCode.OK
        texts[name] = (tmp_path / name / "outputs.jsonl").read_text().partition('"timings"')[0]
    assert texts["file"] == texts["folder"]


def test_the_fingerprint_covers_the_file_and_the_tokenizer_beside_it(job: JobMaker, tmp_path: Path) -> None:
    path = write_sample(tmp_path / "model", Kind.BF16)
    (path.parent / "config.json").write_text("of another model")
    spec = job.spec(model={"path": str(path)})
    known = read_model(spec).files.fingerprint(Digests())
    assert set(known) == {"sample.gguf", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    model, digests = read_model(spec), Digests()
    model.files.fingerprint(digests)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ModelError, match=r"sample.gguf has changed while the model was loaded"):
        model.files.check_unchanged(digests)
    changed = read_model(spec).files.fingerprint(Digests())
    assert {name for name in known if known[name] != changed[name]} == {"sample.gguf"}


def test_a_gguf_file_without_a_tokenizer_says_where_one_is_given(job: JobMaker, tmp_path: Path) -> None:
    path = write_sample(tmp_path / "model", Kind.BF16)
    (path.parent / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"pre is None; .* are read: give --tokenizer a folder or Hub id with a token"):
        read_model(job.spec(model={"path": str(path)}))
    assert read_model(job.spec(model={"path": str(path), "tokenizer": str(MODEL)})).tokenizer is not None
    ids = {"prompt": None, "prompt_token_ids": "ids"}
    assert read_model(job.spec(model={"path": str(path)}, input=ids)).tokenizer is None


@pytest.mark.slow
def test_a_real_file_answers_chats_as_transformers_reads_it() -> None:
    from transformers import AutoModelForCausalLM

    path = smollm2()
    lines = (MODEL.parent / "tickets.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["message"]}] for line in lines[:8]]
    where = {"path": str(path), "dtype": "float32"}
    rows = [{"messages": chat} for chat in chats]
    answers = batchgen.generate(rows, model=where, sampling={"max_tokens": 48}, output={"token_ids": True})
    ours, tokenizer = load_model(str(path), dtype="float32", device="cpu"), read_gguf_tokenizer(path)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = tokenizer.encode_batch([str(prompt) for prompt in tokenizer.render_chats(chats)], False)
    for prompt, answer in zip(prompts, answers.rows, strict=True):
        assert not isinstance(prompt, Exception)
        token_ids = [*prompt, *answer["token_ids"]][:-1]
        with torch.inference_mode():
            expected = theirs(torch.tensor([token_ids])).logits[0]
        torch.testing.assert_close(prefix_logits(ours, token_ids), expected, rtol=0, atol=2e-4)
        assert expected[len(prompt) - 1 :].argmax(-1).tolist() == answer["token_ids"]


@pytest.mark.parametrize(("kind", "is_held"), [(Kind.F16, True), (Kind.F32, False), (Kind.Q8_0, False)])
def test_a_file_with_matrices_in_float16_is_known(tmp_path: Path, kind: Any, is_held: bool) -> None:
    assert holds_float16(write_both(tmp_path, kind)) == is_held
