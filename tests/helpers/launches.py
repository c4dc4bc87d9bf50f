"""Counts what a step launches on a GPU, which need not be there: tensors have shapes and no contents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tiny_model import ragged_input
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_device import CudaKernels, rows

from batchgen.kernels.inputs import ModelInput
from batchgen.model.config import ModelConfig
from batchgen.model.decoder import Decoder
from batchgen.model.state import allocate
from batchgen.model.weights import Init, RandomTensors

_PLAIN = ("subset", "is_causal", "unseen", "num_alone", "pending")  # what is no tensor of an input
META = torch.device("meta")
BLOCK_SIZE = 64
NO_LAUNCH = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}


class Shapes(RandomTensors):
    """Weights without contents."""

    def take(
        self, name: str, shape: tuple[int, ...], init: Init | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=META)


class TorchLaunches(TorchDispatchMode):
    """Counts torch's operations by name, but those that compute nothing."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_LAUNCH:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Launches by name: Triton's kernels, which are counted instead of run, and torch's operations."""
    found: Counter[str] = Counter()
    function: Any = type(rows.rms_norm)
    run = function.run

    def count(self: Any, *_args: Any, **_options: Any) -> None:
        found[self.__name__] += 1

    function.run = count
    try:
        with TorchLaunches(found):
            yield found
    finally:
        function.run = run


def decode_launches(config: ModelConfig, num_seqs: int, kernels: CudaKernels) -> Counter[str]:
    """Launches of a step with one token for each of ``num_seqs`` sequences, when it is run a second time."""
    with torch.inference_mode():
        model = Decoder(config, Shapes(torch.bfloat16, META), kernels)
    inputs, num_blocks = ragged_input([(70 + i, 1) for i in range(num_seqs)], BLOCK_SIZE)
    sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "num_slots": num_seqs}
    state = allocate(config, **sizes, dtype=torch.bfloat16, device=META)
    model.rotary.upto(1024)
    on_meta = {name: getattr(inputs, name).to(META) for name in ModelInput.__slots__ if name not in _PLAIN}
    for _ in range(2):
        with counted() as found:
            logits = model.forward(ModelInput(**on_meta, subset=None), state, 1000)
    assert math.prod(logits.shape) == num_seqs * config.vocab_size
    return found
