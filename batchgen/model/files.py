"""The files of a model: they identify it, and may not change while it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.core.errors import ModelError, UsageError
from batchgen.core.file_digests import Digests, FileState
from batchgen.core.model_files import ADAPTER_FILES, TOKENIZER_FILES, WEIGHTS_FILES, model_files


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files that a model is read from.

    ``name`` is ``model.path``, ``weights`` its folder or GGUF file, None for a dummy; ``tokenizer`` is None for the
    model's own. ``states`` are the states of config, tokenizer and adapter files just before they were read.
    """

    name: str
    weights: Path | None
    tokenizer: Path | None
    adapter: Path | None
    dense: tuple[Path, ...]
    states: Mapping[Path, FileState]

    @property
    def parts(self) -> list[tuple[str, Path, tuple[str, ...]]]:
        """Parts of the model: name ("" for the model itself), folder, and patterns of the files."""
        parts = [
            ("", self.weights, WEIGHTS_FILES),
            ("tokenizer", self.tokenizer, TOKENIZER_FILES),
            ("adapter", self.adapter, ADAPTER_FILES),
            *((f"dense{number}", folder, WEIGHTS_FILES) for number, folder in enumerate(self.dense)),
        ]
        return [(name, folder, patterns) for name, folder, patterns in parts if folder is not None]

    def fingerprint(self, digests: Digests) -> dict[str, Any]:
        """Digests of the files, so that the same files elsewhere are the same model.

        Reads every file of unknown digest from end to end. Raises UsageError if one cannot be read, ModelError if one
        has changed since the model was read.
        """
        fingerprint: dict[str, Any] = {"weights": self.name} if self.weights is None else {}
        for name, folder, patterns in self.parts:
            files = {path.name: digests.digest(path) for path in model_files(folder, patterns)}
            fingerprint |= {name: files} if name else files
        for path, state in self.states.items():
            if digests.state(path) != state:
                raise _changed(path)
        return fingerprint

    def check_unchanged(self, digests: Digests) -> None:
        """Raises ModelError if a file may have changed since its digest was taken, and so before it was loaded."""
        for _, folder, patterns in self.parts:
            for path in model_files(folder, patterns):
                with suppress(OSError):
                    if digests.state(path) == FileState.of(path):
                        continue
                raise _changed(path)


def file_states(folder: Path, patterns: Iterable[str] = TOKENIZER_FILES) -> dict[Path, FileState]:
    """The states of the config and tokenizer files, or of other patterns. Raises UsageError if one cannot be read."""
    files = model_files(folder, patterns)
    try:
        return {path: FileState.of(path) for path in files}
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error


def _changed(path: Path) -> ModelError:
    return ModelError(f"{path} has changed while the model was loaded; run again when nothing writes to it any more")
