"""The model as the runner sees it: what is known without weights, and the engine that has them.

``read_model`` stays clear of torch; ``load_engine`` is the only door to it, so tests and other back ends can put
another engine behind the same protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from batchgen.config.job import InputSpec, JobSpec
from batchgen.config.sampling import card_values
from batchgen.core.errors import InputChanged, ModelError, ResumeMismatch, UsageError
from batchgen.core.fingerprint import Digests, FileState
from batchgen.core.hub import resolve_folder
from batchgen.core.machine import require_address_space
from batchgen.core.model_files import model_files
from batchgen.core.records import Request, Result, SamplingParams
from batchgen.input.requests import RequestBuilder
from batchgen.model import ModelConfig, is_dummy, load_config
from batchgen.output.manifest import KERNELS, mix_kernels
from batchgen.text.stop_strings import StopStrings
from batchgen.text.tokenizer import Tokenizer

_TOKENIZER_PATTERNS = ("*.json", "*.jinja")
_MODEL_PATTERNS = ("*.safetensors", *_TOKENIZER_PATTERNS)


class Stats(Protocol):
    """What an engine has counted since it was made."""

    num_steps: int
    num_prefill_tokens: int
    num_output_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data for the report."""


class EngineLike(Protocol):
    """What the runner needs of ``batchgen.engine.Engine``."""

    @property
    def stats(self) -> Stats:
        """Counts since the engine was made."""

    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Results in order of completion, pulling requests lazily."""

    def stop(self) -> None:
        """Make ``run`` return after the step under way."""

    def unfinished(self) -> Mapping[int, tuple[int, ...]]:
        """Tokens generated so far of every request that was not finished, by key."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine with its weights, and the numerics it computes in; other numerics would give other tokens.

    ``facts`` says for the report, once the engine has run, what sizes it had and what the machine can do; ``notes``
    is for the user, before it runs.
    """

    engine: EngineLike
    numerics: dict[str, str]
    threads: int
    facts: Callable[[], Mapping[str, Any]] = dict
    notes: tuple[str, ...] = ()

    def check(
        self, begun: Mapping[str, str] | None, folder: Path, *, allow_mixed_kernels: bool = False
    ) -> dict[str, str]:
        """The numerics of a run that was begun in some, and None if in what is not known, once it has gone on here.

        Raises ResumeMismatch if they are others here; kernels that are not known may be any.
        """
        if begun is None:
            return self.numerics
        was, now = ({key: value for key, value in n.items() if key != KERNELS} for n in (begun, self.numerics))
        if was != now:
            flags = " ".join(f"--{name} {value}" for name, value in was.items() if value != now.get(name))
            raise ResumeMismatch(
                f"{folder} was begun in {' on '.join(was.values())}, here the model runs in "
                f"{' on '.join(now.values())}, which gives other tokens: "
                f"go on with {flags}, or start anew with --overwrite"
            )
        if KERNELS not in begun or KERNELS not in self.numerics:
            return dict(begun)
        mixed = mix_kernels(begun[KERNELS], self.numerics[KERNELS])
        if mixed != begun[KERNELS] and not allow_mixed_kernels:
            raise ResumeMismatch(
                f"{folder} was begun with the kernels {begun[KERNELS]}, here they are {self.numerics[KERNELS]}, which "
                "add up in another order, so tokens may differ: go on where it was begun, give --allow-mixed-kernels, "
                "or start anew with --overwrite"
            )
        return {**begun, KERNELS: mixed}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model without its weights. ``tokenizer`` is None where there is none: rows then bring token ids.

    ``read_states`` are the states, just before they were read, of the files that this was made from.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    max_model_len: int
    path: str
    folder: Path | None  # None for a dummy
    tokenizer_folder: Path | None  # where it is not the model's own
    read_states: Mapping[Path, FileState]

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        """What a resume is held against: digests of the files, so the same files elsewhere are the same model.

        Reads weights that are not known from end to end. Raises UsageError when a file cannot be read, ModelError when
        one has changed since this model was read.
        """
        found: dict[str, Any] = {"weights": self.path}
        if self.folder is not None:
            found = {path.name: digests.digest(path) for path in model_files(self.folder, _MODEL_PATTERNS)}
        if self.tokenizer_folder is not None:
            files = model_files(self.tokenizer_folder, _TOKENIZER_PATTERNS)
            found["tokenizer"] = {path.name: digests.digest(path) for path in files}
        for path, state in self.read_states.items():
            if digests.state(path) != state:
                raise _changed(path)
        return found

    def check_unchanged(self, digests: Digests) -> None:
        """Raises ModelError if a file may have changed since its digest was taken, as weights loaded since then may."""
        for folder, patterns in ((self.folder, _MODEL_PATTERNS), (self.tokenizer_folder, _TOKENIZER_PATTERNS)):
            for path in model_files(folder, patterns) if folder else ():
                if digests.state(path) is None or not _is_unchanged(path, digests):
                    raise _changed(path)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text, by the word of the model's config or of the tokenizer's folder."""
        return frozenset(self.config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids if self.tokenizer else ())

    def builder(self, where: InputSpec, sampling: SamplingParams, columns: Sequence[str] = ()) -> RequestBuilder:
        """What turns rows into requests for this model; ``columns`` are the job's ``sampling.columns``.

        Raises UsageError when [input] cannot work with it.
        """
        return RequestBuilder(
            where,
            sampling,
            self.tokenizer,
            max_model_len=self.max_model_len,
            vocab_size=self.config.vocab_size,
            card=card_values(self.path),
            columns=columns,
        )


EngineFactory = Callable[[JobSpec, ModelInfo], Backend]


def read_model(spec: JobSpec) -> ModelInfo:
    """Find the model and read all of it but the weights. Raises ModelError, or UsageError for an impossible length."""
    model = spec.model
    states: dict[Path, FileState] = {}
    if not is_dummy(model.path):
        states |= _states(resolve_folder(model.path, model.revision, _TOKENIZER_PATTERNS))
    config = load_config(model.path, model.revision)
    folder = None if is_dummy(model.path) else resolve_folder(model.path, model.revision, _MODEL_PATTERNS)
    tokenizer_folder = folder
    if model.tokenizer:
        revision = "main"  # model.revision is that of the model's own repository
        tokenizer_folder = resolve_folder(model.tokenizer, revision, _TOKENIZER_PATTERNS)
    if tokenizer_folder is not None and tokenizer_folder != folder:
        states |= _states(tokenizer_folder)
    tokenizer = None
    if tokenizer_folder is not None and (model.tokenizer or (tokenizer_folder / "tokenizer.json").is_file()):
        tokenizer = Tokenizer.load(tokenizer_folder)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens, the model {config.vocab_size}"
        raise UsageError(f"the tokenizer has {sizes}: they do not belong together")
    own_tokenizer_folder = tokenizer_folder if model.tokenizer else None
    longest = _max_model_len(spec, config)
    return ModelInfo(config, tokenizer, longest, model.path, folder, own_tokenizer_folder, states)


def load_engine(spec: JobSpec, info: ModelInfo, *, step_by_step: bool = False) -> Backend:
    """The engine of a job with its weights loaded; imports torch.

    With ``step_by_step`` a step is over when ``step`` returns, so that it can be timed, also on a GPU.

    Raises:
        ModelError: the weights are unusable.
        UsageError: sizes or threads that cannot work here.
        OutOfMemory: weights and state do not fit.
    """
    num_params = info.config.linear_params_per_token + info.config.logits_params_per_token
    require_address_space(2 * num_params)  # in the smallest dtype
    from batchgen.engine import Engine
    from batchgen.engine.facts import engine_facts
    from batchgen.engine.load import load_weights, use_threads

    threads = use_threads(spec.engine.threads, info.config)  # before loading, which packs weights and takes threads too
    model = load_weights(spec.model)
    stop_matcher = partial(StopStrings, info.tokenizer) if info.tokenizer else None
    overlaps = False if step_by_step else None
    engine = Engine(model, spec.engine, eos_token_ids=info.eos_token_ids, stop_matcher=stop_matcher, overlaps=overlaps)
    facts = partial(engine_facts, engine)
    return Backend(engine, model.numerics, threads, facts, _notes(model.numerics))


def _notes(numerics: Mapping[str, str]) -> tuple[str, ...]:
    """What a user should know of how the model runs here."""
    if numerics["device"] != "cpu" or numerics["dtype"] == "float16":  # these take other kernels
        return ()
    from batchgen.kernels.cpu.parallel import keeps_kernels

    if keeps_kernels():
        return ()
    return ("kernels cannot be kept here, so each start compiles them anew: set XDG_CACHE_HOME to a writable folder",)


def _max_model_len(spec: JobSpec, config: ModelConfig) -> int:
    wanted = spec.engine.max_model_len
    if wanted is None:
        return config.max_position_embeddings
    if wanted > config.max_position_embeddings:
        trained = config.max_position_embeddings
        raise UsageError(f"engine.max_model_len = {wanted}: the model was trained for {trained} tokens at most")
    return wanted


def _states(folder: Path) -> dict[Path, FileState]:
    """The states of the files that config and tokenizer are made from. Raises UsageError when one cannot be found."""
    files = model_files(folder, _TOKENIZER_PATTERNS)
    try:
        return {path: FileState.of(path) for path in files}
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error


def _is_unchanged(path: Path, digests: Digests) -> bool:
    try:
        return digests.is_unchanged(path)
    except InputChanged:
        return False


def _changed(path: Path) -> ModelError:
    return ModelError(f"{path} has changed while the model was loaded; run again when nothing writes to it any more")
