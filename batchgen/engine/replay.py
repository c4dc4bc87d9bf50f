"""Decode steps run from recordings: kernel launches are recorded once per batch size and then repeated.

A step in which every sequence has one token, or one and as many drafts as the others, does the same work on the same
tensors as any other of its size, so the host need not launch its hundreds of kernels again: it only changes what the
input tensors hold. CUDA graphs are recorded with padding: sizes are rounded up to a few buckets, and the added rows
work on a block and a slot that no sequence owns. All buckets are recorded before the first step. They begin with the
feed of token ids that only the device knows and end with the argmax of each row, so that nothing is launched between
greedy steps but copies. On the CPU a recording is cheap but computes every row it has, so it is made of exactly one
size; feed and argmax stay outside, as its recorder repeats nothing but kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from batchgen.engine.batch import PendingTokens
from batchgen.kernels.inputs import QUERY_BLOCK, ModelInput
from batchgen.kernels.interface import Recorder
from batchgen.model.decoder import Decoder
from batchgen.model.state import StateCache

_USUAL_TOKENS = 4096  # contexts beyond them have recordings of their own; the programs of shorter ones end at once
_MAX_EXACT = 64  # recordings of exact sizes; each holds a few copies of its block tables
_MIN_BLOCKS = 16
_UPLOADS = 10  # that may be under way: the steps of the longest burst and more, so that none waits for one before it
_ALIGNMENT = 64  # bytes: vector loads want it, and so fields share no cache line


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a recording holds fixed beside the model and its state; ``num_threads`` is torch's on the CPU."""

    num_seqs: int
    max_blocks: int
    num_threads: int = 1
    tokens_each: int = 1


@dataclass(frozen=True, slots=True)
class PaddingSlot:
    """A KV block and a convolution slot that no sequence is ever given: those after all others."""

    block: int
    slot: int
    block_size: int


def is_decode(inputs: ModelInput, most: int = QUERY_BLOCK) -> bool:
    """Whether each sequence has as many tokens in this step as any other, up to ``most``, and all logits are wanted."""
    each = inputs.num_tokens // inputs.num_seqs
    is_even = each <= most and torch.equal(inputs.cu_seqlens, each * torch.arange(inputs.num_seqs + 1))
    return is_even and torch.equal(inputs.logits_indices, torch.arange(inputs.num_tokens))


def bucket(num_seqs: int, most: int) -> int:
    """The rows that ``num_seqs`` are padded to, at most ``most``.

    Up to 16 that is a power of two, then a multiple of 16, from 128 on one of at most four steps to a power of two.
    Few rows are padded much, as their time is that of reading the weights.
    """
    power = 1 << (num_seqs - 1).bit_length()
    step = max(16, power >> 3)
    return min(power if num_seqs <= 16 else -(-num_seqs // step) * step, most)


class StepReplays:
    """Runs decode steps of one model, from recordings as far as it has them.

    With ``padding`` each size is padded to its bucket, and recorded on the padding alone: by ``record_all``, or when
    first met. Without, a size is recorded when it is met twice in a row, one with drafts when it is met again, and that
    step's result comes from the recording.

    Attributes:
        newest: with ``padding``, int64 [max_num_seqs] on the device: the likeliest token of each row of logits of the
            step replayed last, -1 for a row that is not finite. The sampler may put others in their place; the next
            replay is fed from here and overwrites it, behind all that was launched before.
    """

    def __init__(
        self, model: Decoder, state: StateCache, recorder: Recorder, padding: PaddingSlot | None, max_model_len: int
    ) -> None:
        self.model = model
        self.state = state
        self.recorder = recorder
        self.padding = padding
        self.max_model_len = max_model_len
        self.most_each = QUERY_BLOCK if padding is None else 1  # tokens of a sequence in a recorded step
        # Recordings hold the address of the rotary table: graphs get one that never grows, others are made anew.
        self.rotary = model.rotary.upto(max_model_len if padding is not None else 0)
        self.newest: Tensor | None = None
        if padding is not None:
            self.newest = torch.zeros(padding.slot, dtype=torch.int64, device=model.device)
        self.recorded: dict[StepSize, tuple[StaticInput, Callable[[], Tensor]]] = {}
        self._newest: StepSize | None = None  # of the steps that were not recorded
        self._drafted: set[StepSize] = set()  # of those with drafts, whose numbers change from step to step

    def record_all(self) -> None:
        """Record each bucket, for contexts of ``_USUAL_TOKENS``: the largest first, whose memory the others share.

        Raises:
            CaptureFailed: see ``CudaRecorder``.
        """
        assert self.padding is not None
        most = self.padding.slot
        for num_seqs in sorted({bucket(n + 1, most) for n in range(most)}, reverse=True):
            self._record_padded(StepSize(num_seqs, self._width(1)), self.padding)

    @torch.inference_mode()
    def run(self, inputs: ModelInput, pending: PendingTokens | None = None) -> Tensor:
        """Logits [num_tokens, vocab_size] for CPU inputs with ``is_decode``, valid until the next call.

        ``pending`` has the token ids that only the device knows.

        Raises:
            CaptureFailed: see ``CudaRecorder``; nothing is computed.
        """
        last = int(inputs.positions.max())
        if (table := self.model.rotary.upto(last + 1)) is not self.rotary:
            self.recorded.clear()
            self.rotary = table
        size = self._size(inputs)
        if size not in self.recorded:
            if self.padding is None:
                if pending is not None:
                    pending.into(inputs.token_ids)
                return self._run_exact(size, inputs, last)
            self._record_padded(size, self.padding)
        static, replay = self.recorded[size]
        if self.newest is None:
            static.fill(inputs)
            if pending is not None:
                pending.into(static.inputs.token_ids)
        else:
            if pending is not None and pending.token_ids.data_ptr() != self.newest.data_ptr():
                self.newest[: len(pending.token_ids)] = pending.token_ids  # of a step that was not replayed, or drawn
            static.fill(inputs, pending)
        return replay()[: inputs.num_tokens]

    def _size(self, inputs: ModelInput) -> StepSize:
        num_seqs, num_blocks = inputs.block_tables.shape
        if self.padding is not None:
            return StepSize(bucket(num_seqs, self.padding.slot), self._width(num_blocks))
        each = inputs.num_tokens // inputs.num_seqs
        return StepSize(num_seqs, self._width(num_blocks), torch.get_num_threads(), each)

    def _width(self, num_blocks: int) -> int:
        """Columns of block tables, those that are not needed included: with padding one width does for most steps."""
        if self.padding is None:
            return max(_MIN_BLOCKS, 1 << (num_blocks - 1).bit_length())
        num_tokens = _USUAL_TOKENS
        while num_tokens < num_blocks * self.padding.block_size:
            num_tokens *= 4
        return -(-min(num_tokens, self.max_model_len) // self.padding.block_size)

    @torch.inference_mode()
    def _record_padded(self, size: StepSize, padding: PaddingSlot) -> None:
        self._record(size, padding, None, self.max_model_len - 1)

    def _run_exact(self, size: StepSize, inputs: ModelInput, last: int) -> Tensor:
        if size != self._newest and size not in self._drafted:
            self._newest = size
            if size.tokens_each > 1:
                self._drafted.add(size)
            return self.model.forward(inputs, self.state, last)
        if len(self.recorded) == _MAX_EXACT:
            del self.recorded[next(iter(self.recorded))]
        return self._record(size, PaddingSlot(0, 0, 1), inputs, last)

    def _record(self, size: StepSize, padding: PaddingSlot, inputs: ModelInput | None, last: int) -> Tensor:
        """Record a step while it is run: recording advances the convolution state of the rows it is made with."""
        static = StaticInput(size, padding, self.model.device)
        static.fill(inputs)
        if self.newest is None:
            logits, replay = self.recorder.record(lambda: self.model.forward(static.inputs, self.state, last))
        else:
            kept = self.newest.clone()  # the step that is recorded now may wait for them
            try:
                logits, replay = self.recorder.record(lambda: self._fed_step(static, last))
            finally:
                self.newest.copy_(kept)
        self.recorded[size] = static, replay
        return logits

    def _fed_step(self, static: StaticInput, last: int) -> Tensor:
        """Logits of a step from the newest ids to the next; both lie at one address, as a stream keeps the order."""
        assert self.newest is not None
        known = torch.cat((static.inputs.token_ids, self.newest))
        token_ids = known.index_select(0, static.feed).clamp_(min=0)  # -1 must not index the embeddings
        logits = self.model.forward(replace(static.inputs, token_ids=token_ids), self.state, last)
        self.newest[: len(logits)] = self.model.kernels.likeliest(logits)
        return logits


class StaticInput:
    """A ``ModelInput`` of one size at fixed addresses; what changes from step to step crosses in one copy.

    ``feed``, int32 [num_tokens], says where the id of each token lies: in ``inputs.token_ids``, which the host knows,
    or that many places behind their end among the ids that the step before gave.
    """

    def __init__(self, size: StepSize, padding: PaddingSlot, device: torch.device) -> None:
        n, each = size.num_seqs, size.tokens_each
        rows = torch.arange(n + 1, dtype=torch.int32)
        nothing = torch.zeros_like(rows[:-1])
        self._alone = torch.stack((rows[:-1], rows[:-1] * each, nothing + each, nothing, nothing), dim=1)
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, (n * each,)),
            "feed": (torch.int32, (n * each,)),
            "slot_mapping": (torch.int64, (n * each,)),
            "block_tables": (torch.int32, (n, size.max_blocks)),
            "positions": (torch.int32, (n * each,)),
            "conv_slots": (torch.int32, (n,)),
            "conv_rejected": (torch.int32, (n,)),
            "query_blocks": (torch.int32, tuple(self._alone.shape)),
        }
        num_bytes = sum(_aligned_bytes(*field) for field in fields.values())
        is_cuda = device.type == "cuda"
        self._sources = cycle([_Source(num_bytes, fields, is_cuda) for _ in range(_UPLOADS if is_cuda else 1)])
        self._target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        views = _views(self._target, fields)
        self.feed = views.pop("feed")
        self._all_known = torch.arange(n * each, dtype=torch.int32)
        self.inputs = ModelInput(
            **views,
            cu_seqlens=rows.to(device) * each,
            logits_indices=torch.arange(n * each, device=device),
            subset=None,
        )
        self.padding = padding

    def fill(self, inputs: ModelInput | None, pending: PendingTokens | None = None) -> None:
        """Take over a step's CPU tensors; the rows left over, or all for None, work on the padding."""
        count, width = (0, 0) if inputs is None else inputs.block_tables.shape
        source, padding = next(self._sources), self.padding
        host = source.views
        if source.copied is not None:
            source.copied.synchronize()  # the last copy has read it
        for name, rest in (("token_ids", 0), ("positions", 0), ("conv_slots", padding.slot), ("conv_rejected", 0)):
            host[name][count:] = rest
        host["slot_mapping"][count:] = padding.block * padding.block_size
        host["query_blocks"].copy_(self._alone)
        host["feed"].copy_(self._all_known)
        if pending is not None:
            newest = len(host["feed"])  # where the newest ids begin
            if pending.rows is None:
                host["feed"][: len(pending.token_ids)] += newest
            else:
                host["feed"][pending.places] = (pending.rows + newest).int()
        host["block_tables"].zero_()
        host["block_tables"][count:, 0] = padding.block
        if inputs is not None:
            for name in ("token_ids", "positions", "conv_slots", "conv_rejected", "slot_mapping", "query_blocks"):
                given = getattr(inputs, name)
                host[name][: len(given)] = given
            host["block_tables"][:count, :width] = inputs.block_tables
        self._target.copy_(source.memory, non_blocking=True)
        if source.copied is not None:
            source.copied.record()


class _Source:
    """Host memory of one upload, pinned so that the copy is no wait, and when it was read."""

    def __init__(self, num_bytes: int, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]], is_cuda: bool) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # unannotated
        self.views = _views(self.memory, fields)


def _aligned_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(memory: Tensor, fields: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Tensors of the given types and shapes, one behind the other in a piece of memory."""
    views, start = {}, 0
    for name, (dtype, shape) in fields.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        views[name] = memory[start : start + num_bytes].view(dtype).view(shape)
        start += _aligned_bytes(dtype, shape)
    return views
