"""CUDA graphs of decode steps: launches are captured once and then repeated by one call.

Sizes are rounded up to a few buckets; the added rows work on a block and a slot that no sequence owns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from batchgen.core.machine import is_out_of_memory
from batchgen.kernels.inputs import ModelInput, StepOutput
from batchgen.kernels.interface import Recorder
from batchgen.model.decoder import Decoder
from batchgen.model.state import StateCache

_USUAL_TOKENS = 4096  # a recording's context; longer ones have others; programs beyond a shorter context end at once
_UPLOADS = 3  # under way at once: for a running step, the next step, and one more
_ANOTHER_TOKEN = 1
_MAX_APART = 2**-6  # logits of two launches of one step, of kernels that may add up in another order each time
_ALIGNMENT = 64  # bytes: vector loads want it, and so fields share no cache line


class CaptureFailed(Exception):
    """A step could not be recorded; nothing is lost, as it can be launched kernel by kernel."""


class CudaRecorder:
    """A ``Recorder`` of CUDA graphs. Record the largest first: its memory pool then has room for all others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.pool = torch.cuda.graph_pool_handle()  # shared, as is the stream: torch and cuBLAS keep memory by stream
        self._graphs: list[torch.cuda.CUDAGraph] = []
        weakref.finalize(self, _destroy, device, self._graphs).atexit = False

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        """See ``Recorder``; the result is valid after a replay. ``work`` runs once before. Raises CaptureFailed."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                work()
                result, graph = self._captured(work)
        except Exception as error:  # Triton's errors lack a common base class
            if is_out_of_memory(error):
                raise
            raise CaptureFailed(str(error).partition("\n")[0]) from error
        finally:
            current.wait_stream(self.stream)  # the first run of ``work`` writes memory, even if its capture failed
        number = len(self._graphs)
        self._graphs.append(graph)

        def replay() -> Tensor:
            self._graphs[number].replay()  # through ``self``, so that the recorder outlives the last recording
            return result

        return result, replay

    def _captured(self, work: Callable[[], Tensor]) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        """Capture ``work`` without ``torch.cuda.graph``, which first waits for the device and empties the allocator."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")  # other threads may pin memory
        try:
            result = unowned(work())
        finally:
            graph.capture_end()
        return result, graph


def unowned(tensor: Tensor) -> Tensor:
    """A view that does not own its memory, so that the next recording can reuse it: each replay replaces the result.

    torch's own users of CUDA graphs alias results by the same constructor.
    """
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride())


def _destroy(device: torch.device, graphs: list[torch.cuda.CUDAGraph]) -> None:
    if graphs:
        # All graphs end together: newer torch frees a stream's workspaces when the first graph captured on it is
        # destroyed, although other graphs still use them.
        torch.cuda.synchronize(device)
        graphs.clear()


def bucket(num_seqs: int, max_num_seqs: int) -> int:
    """The rows that ``num_seqs`` are padded to, at most ``max_num_seqs``.

    Up to 16 rows it is a power of two, then a multiple of 16, and above 128 rows a multiple of an eighth of the next
    power of two. Padding few rows a lot costs little, since reading the weights takes most of their time.
    """
    power = 1 << (num_seqs - 1).bit_length()
    step = max(16, power >> 3)
    return min(power if num_seqs <= 16 else -(-num_seqs // step) * step, max_num_seqs)


class CudaGraphs:
    """Runs decode steps from CUDA graphs, recorded on padding rows: by ``record_all``, or when a size is first met.

    Attributes:
        last_token_ids: int64 [max_num_seqs] on the device, the likeliest token of each row of the last replay's logits,
            or -1. The sampler may replace them; the next replay reads and overwrites them, after all earlier launches.
    """

    def __init__(
        self, model: Decoder, state: StateCache, recorder: Recorder, padding: PaddingSlot, max_model_len: int
    ) -> None:
        self.model, self.state, self.recorder = model, state, recorder
        self.padding, self.max_model_len = padding, max_model_len
        model.rotary.upto(max_model_len)  # graphs hold the address of the table, which grows no more
        self.last_token_ids = torch.zeros(padding.slot, dtype=torch.int64, device=model.device)
        self.recorded: dict[StepSize, tuple[StaticInput, Callable[[], Tensor]]] = {}

    def record_all(self) -> None:
        """Record each bucket, for contexts of ``_USUAL_TOKENS``: the largest first, so that others share its memory.

        Raises CaptureFailed as ``CudaRecorder``, or if the largest or smallest, replayed once, differs from a launched
        step.
        """
        max_num_seqs = self.padding.slot
        sizes = sorted({bucket(n + 1, max_num_seqs) for n in range(max_num_seqs)}, reverse=True)
        for num_seqs in sizes:
            self._record(StepSize(num_seqs, self._width(1)))
        for num_seqs in {sizes[0], sizes[-1]}:
            self._prove(StepSize(num_seqs, self._width(1)))

    @staticmethod
    def takes(inputs: ModelInput) -> bool:
        return inputs.is_decode

    @torch.inference_mode()
    def run(self, inputs: ModelInput) -> StepOutput:
        """The output of a step for CPU inputs that it ``takes``, valid until the next call.

        Raises CaptureFailed as ``CudaRecorder``: nothing is computed.
        """
        num_seqs, num_blocks = inputs.block_tables.shape
        size = StepSize(bucket(num_seqs, self.padding.slot), self._width(num_blocks))
        if size not in self.recorded:
            self._record(size)
        static, replay = self.recorded[size]
        pending = inputs.pending
        if pending is not None and pending.token_ids.data_ptr() != self.last_token_ids.data_ptr():
            self.last_token_ids[: len(pending.token_ids)] = pending.token_ids  # drawn, or from a launched step
        static.fill(inputs)
        return StepOutput(replay()[:num_seqs], self.last_token_ids[:num_seqs])

    def _width(self, num_blocks: int) -> int:
        """Columns of block tables, including unused ones: one width is enough for most steps."""
        num_tokens = _USUAL_TOKENS
        while num_tokens < num_blocks * self.padding.block_size:
            num_tokens *= 4
        return -(-min(num_tokens, self.max_model_len) // self.padding.block_size)

    @torch.inference_mode()
    def _record(self, size: StepSize) -> None:
        static = StaticInput(size, self.padding, self.model.device)
        static.fill(None)
        kept = self.last_token_ids.clone()  # the step that is recorded now may wait for them
        try:
            self.recorded[size] = static, self.recorder.record(lambda: self._fed_step(static))[1]
        finally:
            self.last_token_ids.copy_(kept)

    @torch.inference_mode()
    def _prove(self, size: StepSize) -> None:
        """Replay a recording on the padding with other tokens than were recorded, half of them from the last step.

        Raises CaptureFailed if logits or likeliest tokens differ from a launched step: by a bit, if the back end is
        batch-invariant.
        """
        static, replay = self.recorded[size]
        static.fill(None)
        static.inputs.token_ids.fill_(_ANOTHER_TOKEN)
        static.feed[::2] += size.num_seqs
        tolerance, tensors = 0.0 if self.model.kernels.batch_invariant else _MAX_APART, list[Tensor]()
        for step in (replay, lambda: self._fed_step(static)):
            self.last_token_ids.fill_(_ANOTHER_TOKEN)
            tensors += [step().float().clone(), self.last_token_ids[: size.num_seqs].clone()]
        self.last_token_ids.zero_()
        replayed, ids, launched, expected = tensors
        is_same = torch.allclose(
            replayed, launched, rtol=0, atol=tolerance * float(launched.abs().max()), equal_nan=True
        )
        if not (is_same and (tolerance or torch.equal(ids, expected))):
            raise CaptureFailed("a replayed step differs from a launched one")

    def _fed_step(self, static: StaticInput) -> Tensor:
        """Logits of a step that reads the last step's ids, then overwrites them in place, in the stream's order."""
        all_ids = torch.cat((static.inputs.token_ids, self.last_token_ids))
        token_ids = all_ids.index_select(0, static.feed).clamp_(min=0)  # -1 must not index the embeddings
        inputs = replace(static.inputs, token_ids=token_ids)
        logits = self.model.forward(inputs, self.state, self.max_model_len - 1)
        self.last_token_ids[: len(logits)] = self.model.kernels.argmax_or_none(logits)
        return logits


@dataclass(frozen=True, slots=True)
class StepSize:
    """Sizes fixed in a recording, apart from the model and its state; ``num_threads`` are torch's on the CPU."""

    num_seqs: int
    max_blocks: int
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class PaddingSlot:
    """A KV block and a convolution slot that are never given to a sequence: the last ones."""

    block: int
    slot: int
    block_size: int


class StaticInput:
    """A ``ModelInput`` of one size at fixed addresses; the parts that change per step are copied to the device at once.

    ``feed``, int32 [num_tokens], is the index of each token's id in one list: first ``inputs.token_ids``, which the
    host knows, then the ids of the last step.
    """

    def __init__(self, size: StepSize, padding: PaddingSlot, device: torch.device) -> None:
        n = size.num_seqs
        rows = torch.arange(n + 1, dtype=torch.int32)
        nothing = torch.zeros_like(rows[:-1])
        self._alone = torch.stack((rows[:-1], rows[:-1], nothing + 1, nothing, nothing, nothing), dim=1)
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, (n,)),
            "feed": (torch.int32, (n,)),
            "slot_mapping": (torch.int64, (n,)),
            "block_tables": (torch.int32, (n, size.max_blocks)),
            "positions": (torch.int32, (n,)),
            "conv_slots": (torch.int32, (n,)),
            "query_blocks": (torch.int32, tuple(self._alone.shape)),
        }
        num_bytes = sum(_aligned_bytes(*field) for field in fields.values())
        is_cuda = device.type == "cuda"
        self._sources = cycle([_Source(num_bytes, fields, is_cuda) for _ in range(_UPLOADS if is_cuda else 1)])
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        views = _views(self._target, fields)
        self.feed = views.pop("feed")
        self._all_known = torch.arange(n, dtype=torch.int32)
        fixed = {"cu_seqlens": rows.to(device), "logits_indices": torch.arange(n, device=device)}
        self.inputs = ModelInput(**views, **fixed, subset=None, is_causal=True, num_alone=n, pending=None)
        self.padding = padding

    def fill(self, inputs: ModelInput | None) -> None:
        """Take over a step's CPU tensors; the rows left over, or all for None, work on the padding."""
        count, width = (0, 0) if inputs is None else inputs.block_tables.shape
        source, padding = next(self._sources), self.padding
        host = source.views
        if source.copied is not None:
            source.copied.synchronize()  # the last copy has read it
        for name, rest in (("token_ids", 0), ("positions", 0), ("conv_slots", padding.slot)):
            host[name][count:] = rest
        host["slot_mapping"][count:] = padding.block * padding.block_size
        host["query_blocks"].copy_(self._alone)
        host["feed"].copy_(self._all_known)
        pending = inputs.pending if inputs is not None else None
        if pending is not None:
            newest = len(host["feed"])  # where the newest ids begin
            if pending.rows is None:
                host["feed"][: len(pending.token_ids)] += newest
            else:
                host["feed"][pending.targets] = (pending.rows + newest).int()
        host["block_tables"].zero_()
        host["block_tables"][count:, 0] = padding.block
        if inputs is not None:
            for name in ("token_ids", "positions", "conv_slots", "slot_mapping", "query_blocks"):
                values = getattr(inputs, name)
                host[name][: len(values)] = values
            host["block_tables"][:count, :width] = inputs.block_tables
        self._target.copy_(source.memory, non_blocking=True)
        if source.copied is not None:
            source.copied.record(torch.cuda.current_stream(self._target.device))


class _Source:
    """Host memory of one upload, pinned so that the host need not wait for the copy; ``copied``: the copy's end."""

    def __init__(self, num_bytes: int, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]], is_cuda: bool) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # unannotated
        self.views = _views(self.memory, fields)


def _aligned_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(memory: Tensor, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Tensors of the given types and shapes, one after the other in a piece of memory."""
    views, start = {}, 0
    for name, (dtype, shape) in fields.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        views[name] = memory[start : start + num_bytes].view(dtype).view(shape)
        start += _aligned_bytes(dtype, shape)
    return views
