"""What names no CUDA device means the current one, which is the model's, or is named: a thread has its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchgen.engine.graphs import PaddingSlot, StaticInput, StepSize
from batchgen.engine.replay import fetch_ids
from batchgen.model.load import load_model

SECOND = torch.device("cuda", 1)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices on whose streams events were recorded; None stands for the current device, which is another."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event(found))
    return found


def event(found: list[Any]) -> SimpleNamespace:
    return SimpleNamespace(record=lambda stream=None: found.append(stream), synchronize=lambda: None)


def test_a_cuda_device_is_the_current_one_once_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(device: torch.device) -> None:
        raise InterruptedError(str(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    with pytest.raises(InterruptedError, match="cuda:1"):
        load_model("dummy:LFM2-350M", device="cuda:1", batch_invariant=False)


def test_ids_are_waited_for_on_the_device_that_they_come_from(
    recorded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SimpleNamespace(copy_=lambda ids, non_blocking: None, tolist=lambda: [1, 2])
    monkeypatch.setattr(torch, "empty", lambda *_, **__: host)
    ids: Any = SimpleNamespace(device=SECOND, shape=(2,), dtype=torch.int64)
    assert fetch_ids(ids)() == [1, 2]
    assert recorded == [SECOND]


def test_an_upload_is_waited_for_on_the_device_that_it_goes_to(recorded: list[Any]) -> None:
    static = StaticInput(StepSize(4, 16), PaddingSlot(0, 0, 16), torch.device("cpu"))
    sources = [next(static._sources) for _ in range(3)]
    for source in sources:
        source.copied = event(recorded)
    static.fill(None)
    assert recorded == [torch.device("cpu")], "here that of the tests"
