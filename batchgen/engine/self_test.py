"""Self-test of kernels at first use, and at each start on a device that the authors have not tried.

The real engine runs a small model that has each kind of layer, the widths, heads and formats of the user's model.
"""

from __future__ import annotations

import json
import math
import os
import platform
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen import kernels as kernels_room
from batchgen.core.errors import BatchgenError, ModelError, OutOfMemory
from batchgen.core.machine import UNTRIED_DEVICES, processor_name
from batchgen.core.records import Request, SamplingParams
from batchgen.core.storage import write_atomic
from batchgen.engine.invariants import Comparison, Routing, Runs, made_up_prompts, texts_for
from batchgen.engine.sizes import default_sizes
from batchgen.kernels.interface import Kernels, SamplingRows
from batchgen.kernels.plain import PlainKernels
from batchgen.kernels.processor import target
from batchgen.model.config import LayerShape, ModelConfig
from batchgen.model.decoder import Decoder
from batchgen.model.load import DTYPES
from batchgen.model.weights import Init, RandomTensors, Shape

# Lengths of prompts that also run alone; of short prompts, in which each position counts; of a common prefix, one token
# longer than a KV block; of the texts after it, since a convolution's state at the block's end reaches two tokens.
# A GPU's kernels divide more positions among threads.
_ON_CPU, _ON_GPU = ((1, 5, 20, 72), (2, 3, 4, 7, 8, 9), 33, (0, 1)), ((1, 5, 40, 100, 520), (2, 3, 7, 9), 65, (0, 1))
_MAX_TOKENS = 3
_MAX_WINDOW = 48  # on a CPU, whose kernels take any
_MAX_VOCAB = 4096  # on a CPU, plus the remainder: its kernels divide the vocabulary into equal parts and a rest
_GREEDY = SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True, logprobs=1)
_DRAWN = replace(_GREEDY, temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=1, logprobs=None)
_PENALIZED = replace(_DRAWN, repetition_penalty=1.05, presence_penalty=0.2)
_NUM_ALLOWED = 50
# Largest gap of a logit as a share of the row's largest one: some four times the effect of rounding.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-4}
# Added to it where values are rounded once more (inputs of linears, keys, values): a last bit decides how.
_ROUNDED_TOLERANCE = {"auto": 0.0, "bfloat16": 2**-8, "int8": 2**-4}
_UNTRIED_TOLERANCE = {torch.float32: 2**-7, torch.float16: 2**-5, torch.bfloat16: 2**-2}  # GPUs may round products
_NUM_LOGITS = 1024  # of a row, plus the remainder
_NUM_DRAWS = 48  # per filter of tokens, as only few draws depend on a filter
_DRAW_TOLERANCE = 1e-4  # of a draw's parameters
_MAX_WORDS = 200  # characters of an error
_LIBRARIES = ("torch", "triton", "numba", "llvmlite")
_DRIVER = Path("/proc/driver/nvidia/version")


class SmallTensors(RandomTensors):
    """Random weights that are made fast: whole multiples of a small number, equally likely."""

    def take(self, name: str, shape: Shape, init: Init | None = None, dtype: torch.dtype | None = None) -> Tensor:
        mean, std = init or (0.0, self.std)
        rng = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode()) + self.seed))
        numbers = torch.frombuffer(bytearray(rng.bytes(math.prod(shape))), dtype=torch.int8).view(shape).to(self.device)
        numbers = numbers.to(dtype or self.stored).mul_(std / 73.3)
        return numbers.add_(mean) if mean else numbers


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A small model and its requests. A self-test's verdict depends on these values and on the kernels."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: str = "auto"

    @property
    def shape(self) -> ModelConfig:
        """The user's model with each kind of layer once, ordered by their last occurrence; with a head if causal."""
        layers = tuple(dict.fromkeys(self.config.layers[::-1]))[::-1]
        vocab_size = self.config.vocab_size
        if self.device.type != "cuda":
            layers = tuple(map(_narrowed, layers))
            vocab_size = min(vocab_size, _MAX_VOCAB + vocab_size % _MAX_VOCAB)
        has_head = self.config.is_causal
        return replace(self.config, layers=layers, vocab_size=vocab_size, has_head=has_head, labels=())

    def decoder(self, kernels: Kernels, device: torch.device) -> Decoder:
        """The model with random weights, scaled so that activations keep their magnitude from layer to layer."""
        shape, saved = self.shape, DTYPES.get(self.config.dtype)
        source = SmallTensors(self.dtype, device, std=shape.hidden_size**-0.5, saved=saved)
        with torch.inference_mode():
            return Decoder(shape, source, kernels)

    def requests(self) -> list[Request]:
        """Random prompts that together use every way of choosing tokens; texts for a model that is not causal."""
        vocab_size, max_tokens = self.shape.vocab_size, self.config.max_position_embeddings - _MAX_TOKENS
        alone, short, prefix, suffixes = _ON_GPU if self.device.type == "cuda" else _ON_CPU
        prompts = made_up_prompts(vocab_size, max_tokens, (*alone, *short), prefix, suffixes)
        if not self.config.is_causal:
            return texts_for(prompts)
        first = min(8, vocab_size - 1)
        masked = replace(_GREEDY, allowed_token_ids=tuple(range(first, min(first + _NUM_ALLOWED, vocab_size))))
        params = (_GREEDY, _DRAWN, masked, _PENALIZED)
        return [Request(key, prompt, params[key % len(params)]) for key, prompt in enumerate(prompts)]

    def runs(self, kernels: Kernels, device: torch.device) -> Runs:
        block_size = default_sizes(is_cuda=self.device.type == "cuda")["block_size"]
        return Runs(self.decoder(kernels, device), self.requests(), self.kv_cache_dtype, block_size)

    def plain(self, kernels: Kernels, device: torch.device | None = None) -> PlainKernels:
        weights, activations = kernels.weights, kernels.activations
        return PlainKernels(device or self.device, self.dtype, weights=weights, activations=activations)


def _narrowed(layer: LayerShape) -> LayerShape:
    """A layer whose window ends within the prompts."""
    return replace(layer, window=min(layer.window, _MAX_WINDOW))


def self_tested(kernels: Kernels, small: SmallModel) -> Kernels:
    """The kernels; if they fail the self-test, plain torch with a note for the user.

    Kernels that promise equal bits must give a row the same bits by itself, in a batch, in chunks, after a cached
    prefix and as one prompt. Numbers must match plain torch except for rounding. Verdicts are stored under ``_key``;
    plain torch is not tested. Raises ModelError if the authors have not tried the device and it differs from the CPU.
    """
    device = small.device
    if device.type in UNTRIED_DEVICES and (why := device_fault(kernels, small)):
        raise ModelError(f"device {device.type!r}: {why}; use --device cpu")
    if kernels.name not in ("cpu", "cuda") or not (why := _verdict(kernels, small)):
        return kernels
    plain = small.plain(kernels)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
    others = "torch, triton and the driver" if device.type == "cuda" else "numba and llvmlite"
    plain.notes = (
        *kernels.notes,
        f"self-test: the kernels for {name} are wrong ({why}); plain torch computes instead, slower, and tokens may "
        f"depend on the batch; update {others}, or report it with the output of batchgen env",
    )
    return plain


def cache_folder() -> Path:
    """The folder of verdicts in the user's cache. Raises RuntimeError for a user without a home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchgen"


def _verdict(kernels: Kernels, small: SmallModel) -> str:
    """The fault of the kernels, from the user's cache or found now; "" if they are correct."""
    try:
        path = cache_folder() / "self_test.json"
    except RuntimeError:  # a user without a home folder
        return find_fault(kernels, small)
    key = _key(kernels, small)
    verdict = _verdicts(path).get(key)
    if not isinstance(verdict, dict):
        verdict = {"fault": find_fault(kernels, small)}
        with suppress(OSError, BatchgenError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps({**_verdicts(path), key: verdict}, indent=2).encode() + b"\n")
    return str(verdict.get("fault", ""))


def _verdicts(path: Path) -> dict[str, Any]:
    """The verdicts by key; none from a file that is missing or damaged."""
    try:
        verdicts = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return verdicts if isinstance(verdicts, dict) else {}


def find_fault(kernels: Kernels, small: SmallModel) -> str:
    """The first invariant that the kernels break, and where, or their error; "" if they are correct."""
    rounded = max(_ROUNDED_TOLERANCE[kernels.activations], _ROUNDED_TOLERANCE[small.kv_cache_dtype])
    tolerance = _TOLERANCE[small.dtype] + rounded
    try:
        return _fault(kernels, small.plain(kernels), small, small.device, tolerance)
    except (torch.OutOfMemoryError, MemoryError, OutOfMemory):
        raise
    except Exception as error:  # compilers and drivers raise many kinds, and Triton's lack a common base class
        return _words(error)


def device_fault(kernels: Kernels, small: SmallModel) -> str:
    """The difference between plain torch on a device and on the CPU, or its failure; "" if they agree."""
    cpu, dtype = torch.device("cpu"), str(small.dtype).removeprefix("torch.")
    small = replace(small, config=replace(small.config, dtype=dtype))  # a CPU would hold other numbers of bfloat16
    try:
        fault = _fault(kernels, small.plain(kernels, cpu), small, cpu, _UNTRIED_TOLERANCE[small.dtype])
    except Exception as error:  # torch has many for operations that a device lacks
        return f"a small model fails there ({_words(error)})"
    return fault and f"the numbers of a small model differ from the CPU's ({fault})"


def _fault(kernels: Kernels, plain: PlainKernels, small: SmallModel, device: torch.device, tolerance: float) -> str:
    """The first invariant broken on ``device``: equal bits if the kernels promise them, else within ``tolerance``."""
    runs = small.runs(kernels, small.device)
    bits = 0.0 if kernels.batch_invariant else tolerance
    routing = Routing()
    together, _ = runs.together("all at once")
    solo = runs.solo(runs.requests[: len(_ON_CPU[0])])
    prefilled = runs.prefilled(together.tokens, routing, with_prompts=True)
    comparisons = [Comparison(solo, together, "batched = solo", bits)]
    if small.config.is_causal:
        comparisons.append(Comparison(together, prefilled, "decoded = prefilled", bits))
    del runs
    expected = small.runs(plain, device).prefilled(together.tokens, routing, with_prompts=True)
    comparisons.append(Comparison(expected, prefilled, "kernels ~ plain torch", tolerance))
    for comparison in comparisons:
        if (at := comparison.divergence) is not None:
            position = f"position {at.position} of prompt {at.key}"
            return f"{comparison.name}: {position}, gap {comparison.largest_share:.2g} of the logits"
    return _choice_fault(kernels, plain, small, device) if small.config.is_causal else ""


def _choice_fault(kernels: Kernels, plain: PlainKernels, small: SmallModel, device: torch.device) -> str:
    """The operation on logits that chooses other tokens than plain torch does; "" if all agree."""
    generator = torch.Generator().manual_seed(0)
    width = min(small.config.vocab_size, _NUM_LOGITS + small.config.vocab_size % _NUM_LOGITS)
    drawn = 2 * torch.randn((_NUM_DRAWS, width), generator=generator)
    drawn[0, -1], drawn[1], drawn[2, :2] = torch.nan, -torch.inf, 50.0
    bits = torch.randint(-(2**31), 2**31, (_NUM_DRAWS // 2, -(-width // 32)), generator=generator).int()
    rows = torch.arange(0, _NUM_DRAWS, 2)
    for dtype in dict.fromkeys((small.dtype, torch.float32)):
        logits, expected = drawn.to(dtype).to(small.device), drawn.to(dtype).to(device)
        got, wanted = kernels.argmax_or_none(logits).cpu(), plain.argmax_or_none(expected).cpu()
        if not torch.equal(got, wanted):
            return "argmax differs from plain torch"
        if dtype is small.dtype:  # other logits have been widened before penalties
            ours, theirs = kernels.logsumexp(logits).cpu(), plain.logsumexp(expected).cpu()
            ours, theirs = (sums.masked_fill(~sums.isfinite(), torch.inf) for sums in (ours, theirs))
            if ours.dtype != theirs.dtype or not torch.allclose(ours, theirs, 1e-5, 1e-5):
                return "logsumexp differs from plain torch"
        for settings in ((0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (20, 0.9, 0.01)):
            if not _draws_agree(kernels, plain, logits, expected, settings):
                return "draws differ from plain torch"
    logits, expected = (drawn.to(target, small.dtype, copy=True) for target in (small.device, device))
    kernels.mask(logits, rows.to(small.device), bits.to(small.device))
    plain.mask(expected, rows.to(device), bits.to(device))
    is_same = torch.equal(logits.cpu().nan_to_num(1e9), expected.cpu().nan_to_num(1e9))
    return "" if is_same else "masked tokens differ from plain torch"


def _draws_agree(
    kernels: Kernels, plain: PlainKernels, logits: Tensor, expected: Tensor, settings: tuple[int, float, float]
) -> bool:
    """Whether all draws are the same, except draws that a slightly different parameter would change too."""
    top_k, top_p, min_p = settings

    def drawn(kernels: Kernels, logits: Tensor, by: float = 0.0) -> Tensor:
        uniform = (torch.arange(_NUM_DRAWS, dtype=torch.float64) + 0.5) / _NUM_DRAWS
        rows = SamplingRows(
            temperature=torch.full((_NUM_DRAWS,), 0.8),
            min_p=torch.full((_NUM_DRAWS,), min_p * (1 + by)),
            top_k=torch.full((_NUM_DRAWS,), min(top_k, logits.shape[1])),
            top_p=torch.full((_NUM_DRAWS,), min(top_p + by, 1.0) if top_p < 1 else 1.0, dtype=torch.float64),
            uniform=(uniform + by).clamp(0, 1 - 2**-53),
        )
        columns = {name: getattr(rows, name).to(logits.device) for name in rows.__slots__}
        return kernels.sample(logits, SamplingRows(**columns)).cpu()

    got, wanted = drawn(kernels, logits), drawn(plain, expected)
    if torch.equal(got, wanted):
        return True
    shifted = [drawn(plain, expected, by) for by in (-_DRAW_TOLERANCE, _DRAW_TOLERANCE)]
    is_settled = (shifted[0] == wanted) & (shifted[1] == wanted)
    return bool((got == wanted)[is_settled].all())


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_WORDS] or type(error).__name__


def _key(kernels: Kernels, small: SmallModel) -> str:
    """The name of the device, and a digest of all that a verdict depends on."""
    device = small.device
    if device.type == "cuda":
        name, facts = torch.cuda.get_device_name(device), [str(torch.cuda.get_device_capability(device))]
        with suppress(OSError):
            facts.append(_DRIVER.read_text(encoding="utf-8"))
    else:
        name, facts = processor_name(), [*target(), platform.machine(), str(torch.get_num_threads())]
    facts += [f"{library} {_version(library)}" for library in _LIBRARIES]
    facts += [str(part) for part in (kernels.weights, kernels.activations, kernels.batch_invariant)]
    facts += [str(part) for part in (small.dtype, small.kv_cache_dtype, small.shape)]
    digest = blake2b("|".join(facts).encode(), digest_size=16)
    folder = Path(kernels_room.__file__).parent
    for source in (*sorted(folder.rglob("*.py")), Path(__file__)):
        digest.update(source.read_bytes())
    return f"{name}|{digest.hexdigest()}"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"
