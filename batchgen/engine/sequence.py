"""The engine's state of one request while it is under way."""

from __future__ import annotations

from batchgen.errors import RowError
from batchgen.records import FinishReason, Request, Result, Timings


class Sequence:
    """A request's tokens so far, and where its state is kept.

    What is computed lags behind what is known: a sequence owes ``num_owed`` tokens to the cache. A fresh prompt
    owes all of itself, a decoding sequence owes one, a preempted one owes everything again; nothing else tells
    these phases apart.
    """

    __slots__ = (
        "block_table",
        "conv_slot",
        "finish_reason",
        "finished_at",
        "first_scheduled_at",
        "first_token_at",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "request",
        "submitted_at",
        "token_ids",
    )

    def __init__(self, request: Request, submitted_at: float) -> None:
        self.request = request
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.conv_slot: int | None = None
        self.finish_reason: FinishReason | None = None
        self.num_preemptions = 0
        self.submitted_at = submitted_at
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_owed(self) -> int:
        """Tokens whose KV and convolution state are not cached yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_new_tokens(self) -> int:
        """Tokens this sequence may still generate before ``max_tokens`` ends it."""
        return self.request.params.max_tokens - self.num_output_tokens

    @property
    def is_finished(self) -> bool:
        """Whether no further token will be generated."""
        return self.finish_reason is not None

    def append(self, token_id: int, at: float) -> None:
        """Add a generated token, at an instant of the engine's clock."""
        self.token_ids.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = at

    def stop_reason(self, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Why the newest token ends the sequence, or None."""
        params = self.request.params
        newest = self.token_ids[-1]
        if self.num_output_tokens >= params.min_tokens and (
            newest in params.stop_token_ids or (newest in eos_token_ids and not params.ignore_eos)
        ):
            return FinishReason.STOP
        if self.max_new_tokens <= 0 or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None

    def result(self, error: RowError | None = None) -> Result:
        """What came of the request, once finished or failed."""
        return Result(
            key=self.request.key,
            num_prompt_tokens=self.num_prompt_tokens,
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            finish_reason=self.finish_reason,
            timings=self._timings(),
            error=error,
        )

    def _timings(self) -> Timings:
        start, scheduled, first, end = self.submitted_at, self.first_scheduled_at, self.first_token_at, self.finished_at
        if scheduled is None or first is None or end is None:
            return Timings(preemptions=self.num_preemptions)
        decode_s = end - first
        num_generated = self.num_output_tokens - len(self.request.output_token_ids)  # a resumed one brought some
        return Timings(
            queue_s=scheduled - start,
            prefill_s=first - scheduled,
            decode_s=decode_s,
            ttft_s=first - start,
            tpot_s=decode_s / max(1, num_generated - 1),
            total_s=end - start,
            preemptions=self.num_preemptions,
        )
