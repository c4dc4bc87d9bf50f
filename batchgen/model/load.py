"""Loading of a model: its folder, dtype, device and kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from batchgen.core.errors import ModelError
from batchgen.core.machine import QUANTIZATIONS, SMALLER_SIZES, UNTRIED_DEVICES, memory_errors, physical_bytes
from batchgen.core.model_files import WEIGHTS_FILES, is_gguf, resolve_model
from batchgen.core.units import shown
from batchgen.kernels.cpu import build
from batchgen.kernels.interface import Kernels
from batchgen.kernels.processor import cpu_obstacle
from batchgen.kernels.select import select
from batchgen.model.adapter.settings import read_lora, resolve_adapter
from batchgen.model.adapter.source import LoraTensors
from batchgen.model.config import ModelConfig
from batchgen.model.decoder import Decoder
from batchgen.model.gguf.tensors import GgufTensors
from batchgen.model.registry import dummy_config, is_dummy, read_config
from batchgen.model.weights import Checkpoint, RandomTensors, TensorSource

_TRUNK = "model."
_OTHER_TRUNKS = ("", "language_model.model.", "model.language_model.")  # without the head's module, or in two parts
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@memory_errors("loading the weights", SMALLER_SIZES)
def load_model(  # noqa: PLR0913 - the keys of [model]
    path: str,
    revision: str = "main",
    *,
    dtype: str = "auto",
    quantization: str = "none",
    adapter: str = "",
    device: str = "auto",
    batch_invariant: bool = True,
    has_head: bool = True,
    kernels: Kernels | None = None,
    tested: Callable[[Kernels, ModelConfig, torch.device, torch.dtype], Kernels] | None = None,
) -> Decoder:
    """The model at ``path`` with its weights, ready to run.

    ``dtype`` "auto" is the checkpoint's on CUDA, on the CPU bfloat16 if the machine multiplies it natively, else
    float32. ``quantization`` "w8a16" rounds weights to 8-bit integers with a scale per 32 inputs, "w8a8" with a scale
    per 128, and inputs too, on the CPU only; "none" does not round. ``adapter`` is the folder or Hub id of a LoRA,
    added before that. ``device`` "auto" is CUDA if available, never "mps" or "xpu". Without ``batch_invariant`` cuBLAS
    computes products on a GPU, in an order that depends on the batch. ``kernels`` replaces the device's; ``tested``
    runs their self-test before weights are read and returns the kernels to use. Without ``has_head`` the model gives
    hidden states. Raises ModelError for an unusable folder, config, or weights.
    """
    target = resolve_device(device)
    model = None if is_dummy(path) else resolve_model(path, revision, WEIGHTS_FILES)
    config = dummy_config(path) if model is None else read_config(model)
    lora = read_lora(resolve_adapter(adapter)) if adapter else None
    config = lora.added_to(config) if lora else config
    config = replace(config, has_head=config.has_head and has_head)
    torch_dtype = resolve_dtype(dtype, config, target)
    weights, activations = _forms_of(quantization, target)
    if target.type == "cpu" and kernels is None and (why := cpu_obstacle(activations)):
        raise ModelError(f"device 'cpu': {why}")
    if target.type == "cuda":
        torch.cuda.set_device(target)  # the default device, for example of events
    source: TensorSource
    if model is None:
        source = RandomTensors(torch_dtype, target, saved=DTYPES.get(config.dtype))
    else:
        source = _open(model, config, torch_dtype, target, is_exact=weights == "int8" and target.type == "cpu")
        config = _named_as_stored(config, source)
    if lora is not None:
        source = LoraTensors(source, lora, config)
    if target.type == "cpu":
        name = str(torch_dtype).removeprefix("torch.")
        _require_memory(path, config, name, weights, activations)
        if not build.is_started():  # a caller that knows the engine's settings may have started it
            # While the weights are read.
            build.start(name, config.saved_dtype, weights, activations, "auto", config.parts)
    with torch.inference_mode():
        if kernels is None:
            forms = {"weights": weights, "activations": activations}
            kernels = select(target, torch_dtype, batch_invariant=batch_invariant, is_causal=config.is_causal, **forms)
            kernels = kernels if tested is None else tested(kernels, config, target, torch_dtype)
        return Decoder(config, source, kernels)


def _named_as_stored(config: ModelConfig, source: TensorSource) -> ModelConfig:
    """The shape with the checkpoint's tensor names, if the checkpoint has its layers in another module."""
    name = config.tensor_names["embedding"]
    bare = name.removeprefix(_TRUNK)
    trunk = next((trunk for trunk in _OTHER_TRUNKS if source.holds(f"{trunk}{bare}.weight")), None)
    if config.is_gguf or bare == name or source.holds(f"{name}.weight") or trunk is None:
        return config
    around = trunk.removesuffix(_TRUNK) if trunk.endswith(f".{_TRUNK}") else ""  # the head's module

    def stored(module: str) -> str:
        is_inside = module.startswith(_TRUNK)
        return f"{trunk}{module.removeprefix(_TRUNK)}" if is_inside else f"{around}{module}"

    return replace(config, tensor_names={role: stored(module) for role, module in config.tensor_names.items()})


def _open(
    model: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_exact: bool
) -> TensorSource:
    """The weights in a folder or GGUF file; ``is_exact`` as for ``GgufTensors``. Raises ModelError if unusable."""
    if is_gguf(model):
        return GgufTensors(model, dtype, device, config.head_dim, is_exact=is_exact)
    return Checkpoint(model, dtype, device, config.unread_parts)


def _forms_of(quantization: str, device: torch.device) -> tuple[str, str]:
    """Types of weights and activations. Raises ModelError for an unknown name, and if kernels do not support them."""
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"quantization {shown(quantization)} is not one of {', '.join(QUANTIZATIONS)}")
    if quantization == "w8a8" and device.type != "cpu":
        raise ModelError(
            f"quantization 'w8a8' on device {device.type!r}: only the CPU multiplies integers by integers; "
            "use 'w8a16', or --device cpu"
        )
    return QUANTIZATIONS[quantization]


def _require_memory(path: str, config: ModelConfig, dtype: str, weights: str, activations: str) -> None:
    """Refuse weights that this machine's memory can never hold, whatever form they are stored in."""
    needed = config.model_bytes(dtype, weights, activations, is_cpu=True)
    if needed > physical_bytes():
        form = f"{weights} under {dtype}" if weights != "auto" else dtype
        raise ModelError(
            f"{path}: the weights take {needed:,} bytes in {form}, more than this "
            f"machine's memory of {physical_bytes():,}; run a smaller model"
        )


def resolve_device(device: str) -> torch.device:
    """The device of "auto", "cpu", "cuda", "cuda:N", "mps" or "xpu"; a GPU has its index.

    Raises ModelError for another name, or a GPU that this machine lacks.
    """
    if device in UNTRIED_DEVICES:
        if not (torch.backends.mps.is_available() if device == "mps" else torch.xpu.is_available()):
            raise ModelError(f"device {device!r}: this torch sees no such GPU; use --device cpu")
        return torch.device(device, 0)
    if device not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d{1,4})?", device, re.ASCII):
        raise ModelError(f"device {shown(device)} is not one of auto, cpu, cuda, cuda:N, mps, xpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {device!r}: this torch sees no CUDA device; use --device cpu")
    if device.startswith("cuda:") and int(device[5:]) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ModelError(f"device {device!r}: the last CUDA device that this torch sees is cuda:{last}")
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def resolve_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is explained at ``load_model``.

    Raises ModelError for an unknown name, for float16 on a CPU, which lacks kernels for it, and for float16 if the
    embedding is scaled: the residual stream of such families may exceed 65504.
    """
    if dtype == "auto":
        dtype = config.auto_dtype(is_cpu=device.type == "cpu")
    if dtype not in DTYPES:
        raise ModelError(f"dtype {shown(dtype)} is not one of {', '.join(DTYPES)}")
    if dtype == "float16" and device.type == "cpu":
        raise ModelError("dtype 'float16': a CPU has no kernels for it; use auto, bfloat16 or float32")
    if dtype == "float16" and config.embedding_scale != 1:
        raise ModelError("dtype 'float16': numbers of this model may exceed its range; use bfloat16 or float32")
    return DTYPES[dtype]
