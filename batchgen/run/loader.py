"""Loads the model of a job: first everything except its weights, then the engine with the weights.

``read_model`` does not import torch; ``load_engine`` does, and may be replaced by another ``EngineFactory``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from batchgen.config.job import JobSpec, ModelSpec
from batchgen.config.sampling import ParamError, merge_params, recommended_values
from batchgen.core.errors import ModelError, UsageError
from batchgen.core.file_digests import FileState
from batchgen.core.machine import require_address_space
from batchgen.core.model_files import (
    ADAPTER_FILES,
    TOKENIZER_FILES,
    WEIGHTS_FILES,
    is_gguf,
    resolve_model,
    tokenizer_folder,
)
from batchgen.core.records import SamplingParams
from batchgen.input.requests import RequestBuilder
from batchgen.input.rows import Embedded
from batchgen.input.turns import TurnBuilder
from batchgen.model.adapter.settings import Lora, doubts, read_lora, resolve_adapter
from batchgen.model.config import ModelConfig
from batchgen.model.files import ModelFiles, file_states
from batchgen.model.gguf.config import holds_float16
from batchgen.model.registry import is_dummy, load_config
from batchgen.model.vector_files import VectorFiles, read_vector_files
from batchgen.output.record_builder import RecordBuilder
from batchgen.output.rundir import RunDir
from batchgen.run.loaded_engine import LoadedEngine, RunContext, lasting_imports
from batchgen.run.stop import signals_afterwards
from batchgen.run.vectors import pooler, side_of, with_embedding
from batchgen.text.gguf_tokenizer import read_gguf_tokenizer
from batchgen.text.grammar import Grammars
from batchgen.text.grammar_source import library
from batchgen.text.reasoning import Reasoning
from batchgen.text.stop_strings import StopStrings
from batchgen.text.tokenizer import Tokenizer
from batchgen.text.tool_calls import FAMILIES, tool_format


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model without its weights. Without a ``tokenizer``, rows must hold token ids.

    ``vectors`` says how the checkpoint makes vectors; ``recommended`` are the sampling values of its
    generation_config.json, or None.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    max_model_len: int
    files: ModelFiles
    vectors: VectorFiles = VectorFiles()  # noqa: RUF009 - it is frozen
    recommended: Mapping[str, Any] | None = None
    lora: Lora | None = None
    grammars: Grammars | None = None
    context: RunContext = RunContext()  # noqa: RUF009 - it is frozen

    @property
    def prints_date(self) -> bool:
        """Whether the chat template may print the time at which it is rendered."""
        template = self.tokenizer and self.tokenizer.chat_template
        return bool(template and "strftime_now" in template.names)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids if self.tokenizer else ())

    def resolved(self, spec: JobSpec) -> JobSpec:
        """The job with its "auto" values resolved for this model. Raises UsageError if one cannot be resolved."""
        return with_embedding(self._with_recommended(spec), self.config, self.vectors)

    def _with_recommended(self, spec: JobSpec) -> JobSpec:
        """The job with the model's recommended values, if it asks for them. Raises UsageError if there are none."""
        if spec.explicit_sampling_keys is None:
            return spec
        if self.recommended is None:
            why = "the model has no generation_config.json with values that are possible and supported"
            raise UsageError(f'sampling.generation_config = "auto": {why}')
        values = {name: value for name, value in self.recommended.items() if name not in spec.explicit_sampling_keys}
        try:
            sampling = merge_params(spec.sampling, values)
        except ParamError as error:
            raise UsageError(f"sampling.{error}") from None
        return replace(spec, sampling=sampling, explicit_sampling_keys=None)

    def recommended_hint(self, spec: JobSpec) -> str | None:
        """A line if the model recommends sampling values and the job does not set any."""
        values = self.recommended or {}
        if not values.get("temperature") or not spec.sampling.is_greedy or spec.explicit_sampling_keys is not None:
            return None
        text = ", ".join(f"{name} = {value:g}" for name, value in values.items())
        note = f"the model's generation_config.json recommends {text}; rows are greedy"
        return f"{note} unless they ask for more: --generation-config auto takes these values"

    def refuse_as_target(self, run_dir: RunDir) -> None:
        """Raises UsageError if the run would write into the folder of its model or tokenizer."""
        for _, folder, _ in self.files.parts:
            if folder.resolve() == run_dir.path.resolve():
                raise UsageError(f"output.path = {run_dir.path} is the model's own folder; choose another one")
            if run_dir.owns(folder):
                raise UsageError(f"the model in {folder} would be removed by this run; choose another output.path")

    def builder(self, spec: JobSpec) -> RequestBuilder:
        """The builder of requests of a ``resolved`` job. Raises UsageError if [input] does not fit the model."""
        embed, input_spec, longest = spec.embed, spec.input, self.max_model_len
        settings: SamplingParams | Embedded = spec.sampling
        if embed.is_on:
            widths = [self.config.hidden_size, *(layer.outputs for layer in self.vectors.dense)]
            kept = embed.dimensions or widths[-1]
            takes_lists = embed.pooling != "tokens" and not self.config.labels
            side = self.vectors.sides.get(embed.prompt or "")
            if spec.engine.max_model_len is None:
                longest = min(longest, (side and side.max_tokens) or self.vectors.max_tokens or longest)
            prefix = side.prefix if side else embed.prompt or ""
            ids = side_of(embed, self.vectors, self.tokenizer, longest)
            settings = Embedded(embed.pooling or "", prefix, embed.truncate, kept, takes_lists, ids)
            input_spec = replace(input_spec, chat_template="none")
        make = partial(TurnBuilder, parse=spec.output.parse) if input_spec.regenerate else RequestBuilder
        return make(
            input_spec,
            settings,
            self.tokenizer,
            grammars=self.grammars,
            max_model_len=longest,
            vocab_size=self.config.vocab_size,
            max_tokens_unset=spec.max_tokens_unset,
            packs_logprobs=spec.packs_logprobs,
        )

    def record_builder(self, spec: JobSpec) -> RecordBuilder:
        return RecordBuilder(spec, self.tokenizer, self.config.labels, self.max_model_len, self.eos_token_ids)


EngineFactory = Callable[[JobSpec, ModelInfo], LoadedEngine]


def read_model(spec: JobSpec, now: datetime | None = None) -> ModelInfo:
    """Find the model and read all but its weights; templates print the time ``now``.

    Raises ModelError if the model cannot be used, UsageError if a key of the job does not fit it.
    """
    model = spec.model
    states: dict[Path, FileState] = {}
    if not is_dummy(model.path):
        states |= file_states(resolve_model(model.path, model.revision, TOKENIZER_FILES))
    config, lora = load_config(model.path, model.revision), None
    if model.adapter:
        adapter = resolve_adapter(model.adapter)
        states |= file_states(adapter, ADAPTER_FILES)
        lora = read_lora(adapter)
        config = lora.added_to(config)
    folder = None if is_dummy(model.path) else resolve_model(model.path, model.revision, WEIGHTS_FILES)
    other = None
    if model.tokenizer:
        other = resolve_model(model.tokenizer, "main", TOKENIZER_FILES)  # model.revision applies to the model only
        states = file_states(other) | states
    tokenizer = _read_tokenizer(spec, folder, other, now, config.vocab_size)
    vectors = VectorFiles() if folder is None else read_vector_files(folder)
    dense = tuple(layer.folder for layer in vectors.dense)
    files = ModelFiles(model.path, folder, other, lora.folder if lora else None, dense, states)
    recommended = None if folder is None else _recommended(spec, tokenizer_folder(folder))
    info = ModelInfo(config, tokenizer, _max_model_len(spec, config), files, vectors, recommended, lora)
    if tokenizer is None:
        return info
    return replace(info, grammars=Grammars(tokenizer, config.vocab_size, sorted(info.eos_token_ids)))


def _read_tokenizer(
    spec: JobSpec, model: Path | None, other: Path | None, now: datetime | None, vocab_size: int
) -> Tokenizer | None:
    """The tokenizer of the folder ``other``, or the model's own. Raises UsageError if the job cannot use it."""
    tokenizer = None
    text = spec.input.chat_template
    template = None if text in ("auto", "none") else (spec.chat_template_source, {"default": text})
    folder = other if other or model is None else tokenizer_folder(model)
    if folder is not None and (other or (folder / "tokenizer.json").is_file()):
        tokenizer = Tokenizer.load(folder, now, vocab_size, template)
    elif model is not None and is_gguf(model):
        try:
            tokenizer = read_gguf_tokenizer(model, now, template)
        except ModelError:
            if spec.input.prompt_token_ids is None:
                raise
    if tokenizer is None and "reasoning" in spec.output.parse:
        raise UsageError(
            "output.parse = ['reasoning'] needs a tokenizer and this model has none; name one in model.tokenizer"
        )
    if "tool_calls" in spec.output.parse and (tokenizer is None or tool_format(tokenizer) is None):
        raise UsageError(
            f"output.parse: neither tokenizer nor chat template shows how this model calls tools ({FAMILIES})"
        )
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens, the model {vocab_size}"
        raise UsageError(f"the tokenizer has {sizes}: they do not belong together")
    return tokenizer


def _recommended(spec: JobSpec, folder: Path) -> Mapping[str, Any] | None:
    """``recommended_values``; None if they are impossible, or ModelError if the job asks for them."""
    try:
        return recommended_values(folder)
    except ModelError:
        if spec.explicit_sampling_keys is not None:
            raise
        return None


def load_engine(spec: JobSpec, info: ModelInfo) -> LoadedEngine:
    """Load the weights and create the engine of a job; imports torch.

    Raises ModelError for unusable weights, UsageError for sizes or threads that this machine cannot provide,
    OutOfMemory if weights and state do not fit.
    """
    num_params = info.config.linear_params + info.config.logits_params_per_token
    require_address_space(num_params * (1 if spec.model.weights == "int8" else 2))  # in the smallest dtype
    start_kernels(spec, info.config)  # in parallel with the import of torch
    with signals_afterwards(), lasting_imports():
        from batchgen.engine import Engine
        from batchgen.engine.generation import TextTools
        from batchgen.engine.load import load_weights
        from batchgen.engine.sampler import Sampler
        from batchgen.engine.sizes import reported_sizes, use_threads
        from batchgen.kernels.cpu.parallel import num_launches

    threads = use_threads(spec.engine.threads, info.config)  # before loading, which packs weights and takes threads too
    model = load_weights(spec.model, has_head=not spec.embed.is_on, kv_cache_dtype=spec.engine.kv_cache_dtype)
    text = None
    if info.tokenizer is not None:
        text = TextTools(partial(StopStrings, info.tokenizer), info.grammars, Reasoning(info.tokenizer).thoughts)
    sampler = pooler(spec.embed, info.vectors, model, info.tokenizer) if spec.embed.is_on else Sampler
    engine = Engine(model, spec.engine, eos_token_ids=info.eos_token_ids, text=text, sampler=sampler)
    numerics = engine.numerics
    if spec.sampling.structured_outputs:  # other versions may force other tokens
        numerics |= {"llguidance": str(library().__version__)}
    kernels = (numerics["dtype"] if numerics["device"] == "cpu" else "", *_forms(spec, info.config))
    from batchgen.kernels.cpu import build

    notes = engine.runner.notes  # the list itself, which may grow
    if model.config.has_unexpected_head:
        notes.append(
            "lm_head of this checkpoint is not its embedding, though its config says that they are tied: it is used"
        )
    if model.config.unread_parts:
        notes.append("the vision part of this checkpoint is not read: it runs as a model of text")
    if numerics["dtype"] == "bfloat16" and spec.model.dtype == "auto" and holds_float16(info.files.weights):
        notes.append(
            "the file's float16 weights are rounded to bfloat16, which may change answers: --dtype float32 keeps them"
        )
    notes += doubts(info.lora, info.files.name, info.files.weights)

    def prepare() -> None:
        build.finish(*kernels)
        if why := build.not_kept(*kernels):
            notes.append(why)

    def facts() -> dict[str, Any]:
        return {"sizes": reported_sizes(engine.config, model)}

    return LoadedEngine(engine, numerics, threads, facts, notes, prepare, num_launches=num_launches)


def start_kernels(spec: JobSpec, config: ModelConfig) -> None:
    """Begin to compile the kernels that a job needs on this machine; imports no torch."""
    from batchgen.kernels.cpu import build

    build.start(_kernel_dtype(spec.model, config), *_forms(spec, config))


def _forms(spec: JobSpec, config: ModelConfig) -> tuple[str, ...]:
    """Forms of weights and caches that kernels depend on, in addition to the dtype."""
    settings = (spec.model.weights, spec.model.activations, spec.engine.kv_cache_dtype)
    return (config.saved_dtype, *settings, config.parts)


def _kernel_dtype(model: ModelSpec, config: ModelConfig) -> str:
    """The dtype that kernels are compiled for, as far as known without torch; "" on a GPU."""
    is_cpu = model.device == "cpu" or (model.device == "auto" and not Path("/dev/nvidiactl").exists())
    dtype = config.auto_dtype(is_cpu=True) if model.dtype == "auto" else model.dtype
    return dtype if is_cpu else ""


def _max_model_len(spec: JobSpec, config: ModelConfig) -> int:
    wanted = spec.engine.max_model_len
    if wanted is None:
        return config.max_position_embeddings
    if wanted > config.max_position_embeddings:
        trained = config.max_position_embeddings
        raise UsageError(f"engine.max_model_len = {wanted}: the model was trained for {trained} tokens at most")
    return wanted
