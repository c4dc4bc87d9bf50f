"""The layers behind a model that gives vectors run where the model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from batchgen.kernels.reference import ReferenceKernels
from batchgen.model.vector_files import Dense
from batchgen.model.vectors import VectorHead, VectorSettings

ELSEWHERE = torch.device("meta")


class Elsewhere(ReferenceKernels):
    """Kernels of a device of their own, as Triton's refuse what lies on another one; they give zeros."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        assert weight.device == ELSEWHERE and bias is not None and bias.device == ELSEWHERE

        def product(x: Tensor) -> Tensor:
            assert x.device == ELSEWHERE
            return torch.zeros(len(x), len(weight))

        return product


def test_dense_layers_are_loaded_and_run_on_the_device_of_the_model(tmp_path: Path) -> None:
    save_file({"linear.weight": torch.ones(3, 4), "linear.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    settings = VectorSettings((Dense(tmp_path, 4, 3, has_bias=True, has_tanh=True),))
    head = VectorHead(settings, Elsewhere(), 4, torch.float32, ELSEWHERE)
    assert head(np.ones((2, 4), np.float32)).shape == (2, 3)
