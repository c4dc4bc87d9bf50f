"""The reader of compressed-tensors against that library: what it compresses is read as it decompresses it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_folders import compressed
from safetensors.torch import save_file
from tiny_model import CPU

from batchgen.model.config_values import ConfigValues
from batchgen.model.quantized.checkpoint import QuantizedCheckpoint
from batchgen.model.quantized.settings import parse_quantization

# It imports half of transformers: a test does, not the collection.
pytestmark = pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed; it writes the files"
)

INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
BY_GROUP: dict[str, Any] = {"strategy": "group", "group_size": 32}
ASYMMETRIC: dict[str, Any] = {"symmetric": False}
CASES = [
    ("int-quantized", INT8 | {"strategy": "channel"}),
    ("int-quantized", INT8 | {"strategy": "tensor"}),
    ("int-quantized", INT8 | BY_GROUP | ASYMMETRIC),
    ("naive-quantized", INT8 | {"strategy": "channel"} | ASYMMETRIC),
    ("pack-quantized", INT8 | {"strategy": "channel"}),
    ("pack-quantized", INT8 | BY_GROUP | ASYMMETRIC),
    ("pack-quantized", INT8 | {"num_bits": 4} | BY_GROUP),
    ("pack-quantized", INT8 | {"num_bits": 4, "strategy": "channel"} | ASYMMETRIC),
    ("pack-quantized", INT8 | {"num_bits": 4} | BY_GROUP | ASYMMETRIC),
    ("float-quantized", FP8 | {"strategy": "tensor"}),
    ("float-quantized", FP8 | {"strategy": "channel"}),
    ("float-quantized", FP8 | {"strategy": "block", "block_structure": [16, 48]}),
]


def scale_shape(weights: dict[str, Any], out: int, width: int) -> tuple[int, ...]:
    if weights["strategy"] == "block":
        rows, columns = weights["block_structure"]
        return -(-out // rows), -(-width // columns)
    per_output = {"channel": (out, 1), "group": (out, width // 32), "tensor": (1,)}
    return per_output[weights["strategy"]]


@pytest.mark.parametrize(("file_format", "weights"), CASES, ids=str)
@pytest.mark.parametrize(("out", "width"), [(64, 96), (21, 160), (330, 160)])
def test_what_the_library_compresses_is_read_as_it_decompresses_it(
    tmp_path: Path, file_format: str, weights: dict[str, Any], out: int, width: int
) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(out)
    shape = scale_shape(weights, out, width)
    state = {"weight": torch.randn(out, width), "weight_scale": torch.rand(shape) * 0.02 + 0.01}
    if not weights.get("symmetric", True):
        half = 1 << (weights["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape, dtype=torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(file_format)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    config = {"quantization_config": compressed(file_format, scheme.weights.model_dump(mode="json"))}
    settings = parse_quantization(ConfigValues(config, "here"))
    assert settings is not None
    save_file({f"layer.{name}": part.contiguous() for name, part in stored.items()}, tmp_path / "model.safetensors")
    source = QuantizedCheckpoint(tmp_path, torch.float32, CPU, settings)
    assert torch.equal(source.take("layer.weight", (out, width)), expected)
    source.finish()
