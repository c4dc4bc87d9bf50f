"""CUDA graphs: launches are captured once and then repeated by one call.

All recordings of an engine share a stream and a pool of memory, as torch's allocator keeps memory by stream and cuBLAS
a workspace for each. They also end together, once the device is done with them: newer torch frees the workspaces of a
stream when the first graph that was captured on it is destroyed, and others would go on to use them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from batchgen.core.machine import is_out_of_memory


class CaptureFailed(Exception):
    """A step could not be recorded; nothing is lost, as it can be launched kernel by kernel."""


class CudaRecorder:
    """A ``Recorder`` of CUDA graphs. Their pool is as large as the largest needs, if that one is recorded first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        weakref.finalize(self, _destroy, device, self._graphs).atexit = False

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        """See ``Recorder``; the result is only there after a replay.

        ``work`` runs once before it is captured, which compiles kernels and sets up cuBLAS for the stream.

        Raises:
            CaptureFailed: for a reason other than memory.
        """
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                work()
                result, graph = self._captured(work)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise CaptureFailed(str(error).partition("\n")[0]) from error
        finally:
            current.wait_stream(self.stream)  # the first run of ``work`` writes memory, even if its capture failed
        number = len(self._graphs)
        self._graphs.append(graph)

        def replay() -> Tensor:
            self._graphs[number].replay()  # by way of the recorder, which thus outlives the last recording
            return result

        return result, replay

    def _captured(self, work: Callable[[], Tensor]) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        """``torch.cuda.graph`` would wait for the device and empty the allocator before each capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")  # other threads may pin memory
        try:
            result = unowned(work())
        finally:
            graph.capture_end()
        return result, graph


def unowned(tensor: Tensor) -> Tensor:
    """The same memory without a claim to it: a pool gives it to the next recording too, as results replace each other.

    torch's own users of CUDA graphs alias results by the same constructor.
    """
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride())


def _destroy(device: torch.device, graphs: list[torch.cuda.CUDAGraph]) -> None:
    if graphs:
        torch.cuda.synchronize(device)
        graphs.clear()
