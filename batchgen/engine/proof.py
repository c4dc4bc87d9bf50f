"""Proof at first use that a device's kernels are right for a model: a small model of its shapes, in the real engine.

It has each kind of layer that the model has, twice, with its widths, heads, vocabulary and number formats, and random
weights. On ``ProvenKernels`` it runs made-up requests in chunks, decode steps and reused prefixes. Then it runs again
on what is left of the kernels: a row by itself must have the bits that it has in a batch. The verdict is kept, so that
a machine proves each shape once for each version of the kernels, the libraries and the driver. On a device that the
authors have not tried plain torch is compared with itself on the CPU, at each start.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from batchgen import kernels as kernels_room
from batchgen.config.job import EngineConfig
from batchgen.core.errors import ModelError
from batchgen.core.kept import cache_folder, keep, kept
from batchgen.core.machine import UNTRIED_DEVICES, processor_name
from batchgen.core.records import Request, Result, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.sampler import Sampler
from batchgen.engine.schedule import Schedule
from batchgen.engine.sizes import SchedulerConfig
from batchgen.kernels.inputs import PendingTokens, StepOutput
from batchgen.kernels.interface import Kernels, SamplingRows
from batchgen.kernels.plain import PlainKernels
from batchgen.kernels.processor import target
from batchgen.kernels.proven import BATCH, ProvenKernels, with_plain
from batchgen.model.config import ModelConfig
from batchgen.model.decoder import Decoder
from batchgen.model.load import DTYPES
from batchgen.model.weights import RandomTensors

_LENGTHS = (1, 5, 40, 100, 520)  # of prompts: below a KV block, above one, above the budget of a step
_PREFIX, _SUFFIXES = 80, (0, 10)  # of prompts with a common prefix, longer than a KV block
_MOST_TOKENS, _MOST_ROWS = 256, 6  # of a step
_MOST_IN_A_BLOCK = 64  # positions, on any device
_FIRST_TOKEN = 8  # lower ids are often special tokens
_GREEDY = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)
_DRAWN = replace(_GREEDY, temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=1, logprobs=None)
_PENALIZED = replace(_DRAWN, repetition_penalty=1.05, presence_penalty=0.2)
_NUM_ALLOWED = 50
_MOST_COLUMNS = 4096  # of logits that are kept to be compared
_MOST_APART = {torch.float32: 2**-7, torch.float16: 2**-5, torch.bfloat16: 2**-2}  # a share of all numbers' length
_NUM_DRAWS = 64  # for each filter of tokens: few of them decide
_TESTED = ("x86_64", "amd64")  # processors on which the tests of the kernels run
_LIBRARIES = ("torch", "triton", "numba", "llvmlite")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Setting:
    """Conditions that a proof holds for, beside the kernels themselves."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: str = "auto"

    @property
    def shrunk(self) -> ModelConfig:
        """Each kind of layer twice, and a head whether the model's is used or not."""
        layers = tuple(dict.fromkeys(self.config.layers)) * 2
        return replace(self.config, layers=layers, has_head=self.config.is_causal, labels=())

    def decoder(self, kernels: Kernels) -> Decoder:
        """A small model with random weights that keep the size of numbers from layer to layer."""
        config, saved = self.shrunk, DTYPES.get(self.config.dtype)
        source = RandomTensors(self.dtype, self.device, std=config.hidden_size**-0.5, saved=saved)
        with torch.inference_mode():
            return Decoder(config, source, kernels)

    def engine(self, model: Decoder, runner: Callable[[Decoder, SchedulerConfig], ModelRunner] = ModelRunner) -> Engine:
        """With memory for all requests."""
        num_blocks = sum(-(-len(r.prompt_token_ids) // _MOST_IN_A_BLOCK) + 1 for r in self.requests())
        memory = num_blocks * model.config.kv_block_bytes(_MOST_IN_A_BLOCK, self.dtype.itemsize, self.kv_cache_dtype)
        config = EngineConfig(
            max_num_batched_tokens=_MOST_TOKENS,
            max_num_seqs=_MOST_ROWS,
            kv_cache_memory=max(memory, 1),
            kv_cache_dtype=self.kv_cache_dtype,
            share_duplicates=False,
            forecast_memory=False,
        )
        return Engine(model, config, sampler=Sampler if model.config.has_head else _NoVectors, runner=runner)

    def requests(self) -> list[Request]:
        """Prompts of random tokens, answered in every way of choosing tokens; without a head, texts."""
        rng, vocab_size = random.Random(0), self.config.vocab_size
        first = min(_FIRST_TOKEN, vocab_size - 1)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(rng.randrange(first, vocab_size) for _ in range(count))

        prefix = tokens(_PREFIX)
        prompts = [*map(tokens, _LENGTHS), *(prefix + tokens(count) for count in _SUFFIXES)]
        room = max(self.config.max_position_embeddings - _GREEDY.max_tokens, 1)
        if not self.config.is_causal:
            params = SamplingParams(max_tokens=0)
            return [Request(key, prompt[:room], params, pooling="tokens") for key, prompt in enumerate(prompts)]
        masked = replace(_GREEDY, allowed_token_ids=tuple(range(first, min(first + _NUM_ALLOWED, vocab_size))))
        kinds = (_GREEDY, _DRAWN, masked, _PENALIZED)
        return [Request(key, prompt[:room], kinds[key % len(kinds)]) for key, prompt in enumerate(prompts)]


def proven(kernels: Kernels, setting: Setting, *, always: bool = False) -> Kernels:
    """The kernels, with plain torch in place of what a proof, now or earlier, found to be wrong.

    It is made now unless the verdict is known, the kernels are plain torch themselves or, without ``always``, the
    device is one on which their own tests run.

    Raises:
        ModelError: the device is one that the authors have not tried, and it computes something else than the CPU.
    """
    if setting.device.type in UNTRIED_DEVICES and (why := device_fault(kernels, setting)):
        raise ModelError(f"device {setting.device.type!r}: {why}; use --device cpu")
    if kernels.name not in ("cpu", "cuda"):
        return kernels
    device = setting.device
    is_tested = device.type == "cpu" and platform.machine().lower() in _TESTED
    faults = _known_faults(kernels, setting, finds=always or not is_tested)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
    return with_plain(kernels, _plain(kernels, setting), faults, where) if faults else kernels


def _known_faults(kernels: Kernels, setting: Setting, *, finds: bool) -> Mapping[str, str]:
    """Faults by operation from the user's cache; if there are none, with ``finds``, found now."""
    try:
        path = cache_folder() / "proofs.json"
    except RuntimeError:  # a user without a home folder
        return find_faults(kernels, setting) if finds else {}
    if not finds and not path.exists():
        return {}
    key = _key(kernels, setting)
    if (faults := kept(path, key)) is None and finds:
        keep(path, key, faults := find_faults(kernels, setting))
    return {name: str(why) for name, why in (faults or {}).items()}


def find_faults(kernels: Kernels, setting: Setting) -> dict[str, str]:
    """Differences from plain torch, and failures, by operation; ``BATCH`` where a row's bits depend on others."""
    plain = _plain(kernels, setting)
    proving = ProvenKernels(kernels, plain)
    model = setting.decoder(proving)
    for _ in setting.engine(model).run(setting.requests()):
        pass
    if model.config.has_head:
        _draw(proving, setting)
    faults = dict(proving.faults)
    if kernels.batch_invariant and not faults and model.config.has_head:
        faults |= _batch_faults(setting.decoder(kernels), setting)
    return faults


def device_fault(kernels: Kernels, setting: Setting) -> str:
    """Difference of a small model's numbers from those of plain torch on the CPU, or its failure; "" if they agree."""
    saved = replace(setting.config, dtype=str(setting.dtype).removeprefix("torch."))  # as weights are held elsewhere
    on_cpu = replace(setting, config=saved, device=torch.device("cpu"))
    try:
        actual = _numbers(kernels, setting)
    except Exception as error:  # torch has many for operations that a device lacks
        return f"a small model fails there ({' '.join(str(error).split())[:200] or type(error).__name__})"
    expected = _numbers(_plain(kernels, on_cpu), on_cpu)
    apart = torch.inf  # numbers that are not finite end a row, so that others follow
    if actual.shape == expected.shape:
        apart = float((actual - expected).norm() / expected.norm())
    is_near = apart <= _MOST_APART[setting.dtype]
    return "" if is_near else f"the numbers of a small model differ from the CPU's, by {apart:.2g} of their length"


def _numbers(kernels: Kernels, setting: Setting) -> torch.Tensor:
    """Logits, or hidden states, of prompts and of outputs that are the same on any device."""
    numbers: list[torch.Tensor] = []
    requests = setting.requests()
    if setting.shrunk.has_head:
        forced = (min(_FIRST_TOKEN, setting.config.vocab_size - 1),)
        params = replace(_GREEDY, allowed_token_ids=forced)
        scored = replace(params, prompt_logprobs=0)  # which takes no prefix from others
        requests = [replace(r, params=scored if r.key < len(_LENGTHS) else params) for r in requests]
    for _ in setting.engine(setting.decoder(kernels), partial(_KeepingRunner, numbers)).run(requests):
        pass
    return torch.cat(numbers)


def _plain(kernels: Kernels, setting: Setting) -> PlainKernels:
    place = setting.device, setting.dtype
    return PlainKernels(*place, weights=kernels.weights, activations=kernels.activations)


def _draw(kernels: Kernels, setting: Setting) -> None:
    """Draws with each filter alone and all together."""
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_DRAWS, setting.config.vocab_size)
    logits = (2 * torch.randn(shape, generator=generator)).to(setting.dtype).to(setting.device)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.1), (20, 0.9, 0.01)):
        rows = SamplingRows(
            temperature=torch.full((_NUM_DRAWS,), 0.8),
            min_p=torch.full((_NUM_DRAWS,), min_p),
            top_k=torch.full((_NUM_DRAWS,), min(top_k, shape[1])),
            top_p=torch.full((_NUM_DRAWS,), top_p, dtype=torch.float64),
            uniform=(torch.arange(_NUM_DRAWS, dtype=torch.float64) + 0.5) / _NUM_DRAWS,
        )
        columns = {name: getattr(rows, name).to(setting.device) for name in rows.__slots__}
        kernels.sample(logits, SamplingRows(**columns))


def _batch_faults(model: Decoder, setting: Setting) -> dict[str, str]:
    """Fault of greedy rows that by themselves have other log-probabilities, by a bit or more, than among others."""
    requests = setting.requests()
    together = {result.key: result for result in setting.engine(model).run(requests)}
    for request in [request for request in requests if request.params == _GREEDY]:
        (alone,) = setting.engine(model).run([request])
        if _said(alone) != _said(together[request.key]):
            return {BATCH: "a row by itself has other log-probabilities than among others"}
    return {}


def _said(result: Result) -> object:
    return result.token_ids, result.logprobs


def _key(kernels: Kernels, setting: Setting) -> str:
    """A digest of all that a verdict depends on, behind the name of the device."""
    device = setting.device
    if device.type == "cuda":
        name, facts = torch.cuda.get_device_name(device), [str(torch.cuda.get_device_capability(device))]
        with suppress(OSError):
            facts.append(_DRIVER.read_text(encoding="utf-8"))
    else:
        name, facts = processor_name(), [*target(), platform.machine()]
    facts += [f"{library} {_version(library)}" for library in _LIBRARIES]
    facts += [str(part) for part in (kernels.weights, kernels.activations, kernels.batch_invariant)]
    facts += [str(part) for part in (setting.dtype, setting.kv_cache_dtype, setting.shrunk)]
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


class _KeepingRunner(ModelRunner):
    """Keeps what the model gives, of large vocabularies some columns, in the order of the steps."""

    def __init__(self, numbers: list[torch.Tensor], model: Decoder, config: SchedulerConfig) -> None:
        super().__init__(model, config)
        self.numbers = numbers

    def run(self, schedule: Schedule, pending: PendingTokens | None = None) -> StepOutput:
        output = super().run(schedule, pending)
        step = max(output.logits.shape[1] // _MOST_COLUMNS, 1)
        self.numbers.append(output.logits[:, ::step].float().clone())
        return output


class _NoVectors(Sampler):
    """Passes over the hidden states of texts, of which nothing is made."""

    def score(self, logits: torch.Tensor, scored: Any) -> None:
        for sequence, indexes in scored:
            sequence.generation.next_scored += len(indexes)
