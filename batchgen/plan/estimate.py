"""Survey of a job's rows, in one pass over the input, and estimates of what they will take.

Memory is bounded: lengths are counted, and only a random sample of the rows is kept. Each figure carries its basis, and
is left out without one. It needs no weights and imports no torch.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from batchgen.config.job import JobSpec
from batchgen.core.chat_rows import ChatRow
from batchgen.core.errors import UsageError
from batchgen.core.machine import UNTRIED_DEVICES, available_bytes, visible_gpus
from batchgen.core.numerics import Numerics
from batchgen.core.records import Request, Row
from batchgen.engine.sizes import SchedulerConfig, sizes_for
from batchgen.input.ids import RowValidator
from batchgen.input.rows import prepared
from batchgen.model.config import ModelConfig, item_bytes

MAX_LISTED_BAD_ROWS = 10_000
_NUM_SAMPLED = 64  # rows that a calibration runs


class Reservoir:
    """Uniform random sample of a stream; all of the stream, in order, while it has at most ``size`` items."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_seen = 0
        self._rng = random.Random(0)  # the same rows give the same plan
        self.items: list[Any] = []

    def add(self, item: Any) -> None:
        self._num_seen += 1
        if len(self.items) < self._size:
            self.items.append(item)
        elif (slot := int(self._rng.random() * self._num_seen)) < self._size:
            self.items[slot] = item


class Survey:
    """Everything counted so far: ``take`` the rows, then read the attributes.

    ``prompt_lengths`` counts rows by prompt tokens, ``outputs`` by (most output tokens, whether fixed);
    ``label_tokens`` counts tokens of labels to be scored; ``read_s`` is the time of reading and tokenizing. Reused rows
    only count in ``num_reused``. A chat generated turn by turn has the tokens of its last prompt, with answers of one
    letter, and an output per turn.
    """

    def __init__(
        self, validator: RowValidator, max_model_len: int, is_reused: Callable[[Row], bool] = lambda row: False
    ) -> None:
        self._validator = validator
        self._is_reused = is_reused
        self.num_reused = 0
        self._max_model_len = max_model_len
        self.errors: Counter[str] = Counter()
        self.bad_rows: list[Row] = []
        self.prompt_lengths: Counter[int] = Counter()
        self.outputs: Counter[tuple[int, bool]] = Counter()
        self.turns: Counter[int] = Counter()
        self.label_tokens = 0
        self.logprob_bytes = self.max_logprob_bytes = 0  # in all records, and in the largest
        self.sampled = Reservoir(_NUM_SAMPLED)
        self.read_s = 0.0
        self.empty_fields: Counter[str] = Counter()  # fields of the prompt's template: rows that can run without them

    @property
    def num_good(self) -> int:
        """Rows that can run and are not reused."""
        return self.prompt_lengths.total()

    @property
    def prompt_tokens(self) -> int:
        return sum(length * count for length, count in self.prompt_lengths.items())

    def take(self, rows: Iterable[Row]) -> None:
        """Read, validate and tokenize ``rows``."""
        start = time.monotonic()
        for row, request in prepared(rows, self._validator.build):
            if row.error is not None:
                self.errors[str(row.error.code)] += 1
                if len(self.bad_rows) < MAX_LISTED_BAD_ROWS:
                    self.bad_rows.append(row)
            elif self._is_reused(row):
                self.num_reused += 1
            elif request is not None:
                self._add(row, request)
        self.read_s += time.monotonic() - start

    def _add(self, row: Row, request: Request) -> None:
        length, params = len(request.prompt_token_ids), request.params
        num_outputs = 1 if params.is_greedy else params.n
        if isinstance(row, ChatRow):
            length, num_outputs = row.num_tokens, row.num_turns
            self.turns[num_outputs] += 1
        is_scored = bool(request.labels)
        is_fixed = params.has_fixed_length or is_scored
        max_output = 0 if is_scored else min(params.max_tokens, max(self._max_model_len - length, 0))
        if template := self._validator.builder.finder.template:
            self.empty_fields.update(template.empty_fields(row.columns))
        self.prompt_lengths[length] += 1
        self.outputs[max_output, is_fixed] += num_outputs
        self.label_tokens += sum(map(len, request.labels))
        if params.has_logprobs:
            size = self._validator.builder.logprob_bytes(params, length)
            self.logprob_bytes += size
            self.max_logprob_bytes = max(self.max_logprob_bytes, size)
        self.sampled.add(request)


@dataclass(frozen=True, slots=True)
class ExpectedLengths:
    """Expected output lengths of rows without a fixed length.

    ``values`` are equally likely lengths, before each row's own limit; empty means that only the limit is known.
    ``basis`` tells the user where they come from.
    """

    basis: str
    values: tuple[int, ...] = ()

    @classmethod
    def around(cls, basis: str, mean: float) -> ExpectedLengths:
        """Every row as long as the mean."""
        return cls(basis, (max(1, round(mean)),))

    @classmethod
    def limits(cls, survey: Survey) -> ExpectedLengths:
        """Every row at its limit: nothing else is known before a row has run."""
        is_fixed = all(is_fixed for _, is_fixed in survey.outputs)
        return cls("fixed by the job" if is_fixed else "max_tokens, an upper bound")

    @classmethod
    def observed(cls, finished: list[int], unfinished: list[int]) -> ExpectedLengths | None:
        """Lengths of sampled rows, some of them still unfinished; None if none finished.

        If some are unfinished, each row gets the mean: all tokens so far, divided by the number of ended rows.
        """
        if not finished:
            return None
        basis = f"{len(finished)} sampled rows run to their end"
        if not unfinished:
            return cls(basis, tuple(sorted(finished)))
        return cls.around(basis, (sum(finished) + sum(unfinished)) / len(finished))

    def total(self, survey: Survey) -> int:
        return round(sum(self._mean(*limit) * count for limit, count in survey.outputs.items()))

    def _mean(self, max_output: int, is_fixed: bool) -> float:
        if is_fixed or not self.values:
            return max_output
        return sum(min(value, max_output) for value in self.values) / len(self.values)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a run from start to end, and the engine's share of them; ``basis`` for a person."""

    basis: str
    wall_s: float
    engine_s: float

    def on_workers(self, number: int) -> Estimate:
        """The same with the engine's work divided among workers."""
        engine_s = self.engine_s / number
        return Estimate(self.basis, self.wall_s - self.engine_s + engine_s, engine_s)


@dataclass(frozen=True, slots=True)
class WorkersPlan:
    """Engines of a run: ``number`` compute at once, each as fast as here; more than ``at_most`` lack full batches.

    ``number`` is None for a Ray cluster whose nodes are not known here.
    """

    number: int | None
    at_most: int


def workers_plan(spec: JobSpec, num_rows: int, max_num_seqs: int) -> WorkersPlan | None:
    """The workers of a job, by default one per GPU; None if its rows do not go to workers.

    Workers that share the processors of this machine are together as fast as one process.
    """
    cluster = spec.cluster
    if not cluster.is_used:
        return None
    number: int | None = 1
    if cluster.ray or _is_cuda(spec):
        gpus_each = 1 if cluster.gpus_per_worker is None else cluster.gpus_per_worker
        num_places = len(visible_gpus(spec.model.device)) // gpus_each if gpus_each else 1
        number = cluster.bounds[1] if cluster.bounds else None if cluster.ray else max(1, num_places)
    return WorkersPlan(number, max(1, num_rows // (4 * max_num_seqs)))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected lengths and time, and the engine's numerics and sizes if an earlier run or a calibration knows them."""

    lengths: ExpectedLengths
    estimate: Estimate | None = None
    numerics: Mapping[str, str] = field(default_factory=dict)
    sizes: SchedulerConfig | None = None


def comparable(report: Mapping[str, Any], spec: JobSpec, processor: str) -> bool:
    """Whether an earlier run's report has a rate for this model, adapter, quantization, machine and kind of work."""
    model, tokens = spec.model, report["tokens"]
    numerics = Numerics.of(report["numerics"])
    named = {name: report[name] for name in ("model", "adapter") if name in report}
    is_model = named == model.named and (numerics.weights, numerics.activations) == (model.weights, model.activations)
    is_same = is_model and report["machine"]["processor"] == processor
    is_kind = tokens["total"] > 0 and (tokens["completion"] == 0) == spec.embed.is_on
    return bool(is_same and is_kind and report["generate_s"] > 0)


def forecast_from_report(report: Mapping[str, Any], survey: Survey, lengths: ExpectedLengths | None) -> Forecast:
    """The job at an earlier run's rate: all tokens, prompt and output, per second of generating.

    If ``lengths`` is None, the mean answer of that run is used. The turns of a chat repeat its tokens, so that only
    computed tokens count there.
    """
    mean = report["tokens"]["completion"] / max(sum(report["finish_reasons"].values()), 1)
    lengths = lengths or ExpectedLengths.around(f"the mean of the last run, {mean:,.1f}", mean)
    rate = (report["computed_tokens"] if survey.turns else report["tokens"]["total"]) / report["generate_s"]
    engine_s = (survey.prompt_tokens + lengths.total(survey)) / rate
    load_s = report["seconds"].get("load", 0.0) / report["sessions"]
    estimate = Estimate("the last run's rate", load_s + survey.read_s + engine_s, engine_s)
    return Forecast(lengths, estimate, report["numerics"])


def kv_plan(spec: JobSpec, config: ModelConfig, mean_tokens: float, forecast: Forecast) -> dict[str, Any]:
    """KV memory of a row of ``mean_tokens``, and how many tokens and such rows fit at once (None: unknown).

    It uses the engine's arithmetic on the memory that is free now, minus the weights. The free memory of a GPU is only
    known from a calibration. Raises UsageError for sizes that cannot work.
    """
    is_cpu = not _is_cuda(spec) and spec.model.device not in UNTRIED_DEVICES
    dtype = forecast.numerics.get("dtype") or spec.model.dtype
    if dtype == "auto":
        dtype = config.auto_dtype(is_cpu=is_cpu)
    itemsize = item_bytes(dtype)
    is_auto = spec.engine.kv_cache_memory is None
    is_known = forecast.sizes is not None or not is_auto or not _is_cuda(spec)
    weights = config.model_bytes(dtype, spec.model.weights, spec.model.activations, is_cpu=is_cpu)
    free_bytes = max(0, available_bytes() - weights)  # once they are loaded
    if is_auto and forecast.sizes is None and not _is_cuda(spec) and not free_bytes:
        has = f"the weights take {weights / 1e9:,.1f} GB, this machine has {available_bytes() / 1e9:,.1f} GB free"
        raise UsageError(
            f"{spec.model.path}: {has}; run a smaller model, or give kv_cache_memory to plan for another machine"
        )
    sizes = forecast.sizes or sizes_for(spec.engine, config, itemsize, free_bytes, is_cuda=_is_cuda(spec))
    block_bytes = config.kv_block_bytes(sizes.block_size, itemsize, spec.engine.kv_cache_dtype)
    row_blocks = max(1, -(-round(mean_tokens) // sizes.block_size))
    return {
        "dtype": dtype if spec.engine.kv_cache_dtype == "auto" else spec.engine.kv_cache_dtype,
        "block_size": sizes.block_size,
        "bytes_per_token": block_bytes // sizes.block_size,
        "mean_row_bytes": row_blocks * block_bytes,
        "max_num_seqs": sizes.max_num_seqs,
        "is_auto": is_auto,
        "memory_bytes": sizes.num_blocks * block_bytes if is_known else None,
        "tokens_that_fit": sizes.max_num_tokens if is_known else None,
        "rows_that_fit": sizes.num_blocks // row_blocks if is_known else None,
    }


def _is_cuda(spec: JobSpec) -> bool:
    """Whether the job will run on a GPU; for "auto", whether a GPU is visible and torch is not a CPU-only build."""
    device = spec.model.device
    return device.startswith("cuda") or (
        device == "auto" and "+cpu" not in version("torch") and bool(visible_gpus(device))
    )
