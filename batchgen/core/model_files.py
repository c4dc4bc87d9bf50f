"""Finds the files of a model, a folder or a GGUF file, on this machine or in the Hub's cache; checks and reads them.

Their content is hostile by default: only files that match the caller's patterns of data formats are downloaded. Kind
and size of each are checked before any is opened, since a FIFO, a device or a sparse file would never end.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen.core.errors import ModelError
from batchgen.core.units import one_line, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("*.json", "*.jinja")
WEIGHTS_FILES = ("*.safetensors", *TOKENIZER_FILES)
ADAPTER_FILES = ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
MORE_TEMPLATES = "additional_chat_templates"  # a folder of files, each named after its template's purpose
_DATA_NAMES = frozenset(
    (
        *(_CONFIG, GENERATION_CONFIG, INDEX),
        *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("chat_template.jinja", "default.jinja", "tool_use.jinja"),
    )
)
_MAX_INDEX_BYTES = 16 << 20  # 100,000 tensors
_MAX_GENERATION_BYTES = 1 << 20  # published ones have 200 bytes
_MAX_TOKEN_ID = 2**31 - 1  # the limit of the kernels' 32-bit indices
_MAX_DATA_BYTES = 1 << 30  # of a JSON file or template; the largest tokenizers have 50 MB
_MAX_WEIGHTS_BYTES = 1 << 40  # of one file of weights; the Hub takes none above 0.5 TB
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # the start of a pointer file in a clone without Git LFS
_MAX_POINTER_BYTES = 1023  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_WEIGHT_SUFFIXES = (".safetensors", ".gguf")
_REMEDY = "make it a readable file, or remove it"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_GGUF_ID = re.compile(r"([\w.-]+/[\w.-]+)/([\w.-]+\.gguf)")


def is_gguf(model: Path) -> bool:
    """Whether a model is a GGUF file: config and weights in one, with a tokenizer in it, next to it or elsewhere."""
    return model.suffix == ".gguf" and not model.is_dir()


def tokenizer_folder(model: Path) -> Path:
    """The folder that a model's own tokenizer would be in."""
    return model.parent if is_gguf(model) else model


def model_files(model: Path, patterns: Iterable[str]) -> list[Path]:
    """The files of a model or tokenizer that match one of ``patterns``, sorted; a GGUF file is always among them.

    ``ADAPTER_FILES`` give the two files of an adapter, present or not. Raises ModelError for an unusable index of
    weights.
    """
    if (patterns := tuple(patterns)) == ADAPTER_FILES:
        return [model / name for name in ADAPTER_FILES]
    if is_gguf(model):
        names, own = _DATA_NAMES - {_CONFIG, INDEX}, {model}
    else:
        names, own = _DATA_NAMES | set((weight_map(model) or {"": WEIGHTS}).values()), set()
    homes = (tokenizer_folder(model), tokenizer_folder(model) / MORE_TEMPLATES)
    paths = (path for home in homes for pattern in patterns for path in home.glob(pattern))
    return sorted(own.union(path for path in paths if path.name in names))


def check_files(model: Path, patterns: Iterable[str]) -> None:
    """Check every file that ``model_files`` finds, without opening any but the index of the weights and tiny ones.

    Raises ModelError if one is not a regular file (or a link to one), too large for its name, or a pointer of Git LFS.
    """
    for path in model_files(model, patterns):
        size, limit = file_bytes(path), _MAX_WEIGHTS_BYTES if path.suffix in _WEIGHT_SUFFIXES else _MAX_DATA_BYTES
        if size > limit:
            raise ModelError(f"{path}: has {size:,} bytes, more than the {limit:,} that a model's files have")
        if size <= _MAX_POINTER_BYTES and _is_pointer(path):
            raise ModelError(f"{path}: is a pointer of Git LFS and not the file; fetch it with git lfs pull")


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:  # an error of the module that reads the file
        return False


def weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> name of its file in ``folder``, by the index of the weights; None if all are in one file.

    A single file comes first, as in transformers: it may have been saved over an older index. Raises ModelError if the
    index is unusable, or names something else than a safetensors file of this folder.
    """
    index = folder / INDEX
    if os.path.lexists(folder / WEIGHTS) or not os.path.lexists(index):
        return None
    names = read_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict):
        raise ModelError(f"{index}: not a safetensors index (weight_map is {shown(names)})")
    for file in names.values():
        if not isinstance(file, str) or not _is_file_name(file):
            raise ModelError(f"{index}: names {shown(file)}, which is not a safetensors file of this folder")
    return names


def _is_file_name(name: str) -> bool:
    return Path(name).name == name and name.endswith(".safetensors") and name.isprintable()


def file_bytes(path: Path) -> int:
    """Size of a regular file; links are followed. Raises ModelError for a missing or another kind of file."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        file_type = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ModelError(f"{path}: is {file_type}, not a regular file; a model folder holds regular files only")
    return status.st_size


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a UTF-8 file of at most ``max_bytes`` bytes. Raises ModelError for any other file."""
    size = file_bytes(path)
    if size > max_bytes:
        raise ModelError(f"{path}: has {size:,} bytes; a file of this name has {max_bytes:,} at most")
    try:
        with path.open("rb") as file:
            return file.read(size).decode()
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 ({one_line(error)})") from None


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most ``max_bytes`` bytes. Raises ModelError for any other file."""
    text = read_text(path, max_bytes)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise ModelError(f"{path}: not valid JSON ({why})") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def generation_config(folder: Path) -> dict[str, Any] | None:
    """Content of ``generation_config.json`` in ``folder``, None without such a file. Raises ModelError."""
    path = folder / GENERATION_CONFIG
    return read_object(path, _MAX_GENERATION_BYTES) if path.exists() else None


def generation_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End tokens that ``generation_config.json`` of ``folder`` names; empty without such a file. Raises ModelError."""
    return token_ids(generation_config(folder) or {}, "eos_token_id", str(folder / GENERATION_CONFIG))


def token_ids(values: Mapping[str, Any], key: str, location: str) -> tuple[int, ...]:
    """The token ids under ``key``, which may be one id, a list of ids or absent. ModelError names ``location``."""
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(is_token_id, ids)):
        raise ModelError(f"{location}: {key} is neither a token id nor a list of them: {shown(value)}")
    return tuple(ids)


def is_token_id(value: object) -> bool:
    """Whether a JSON value can be the id of a token."""
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _unreadable(path: Path, error: Exception) -> ModelError:
    why = error.strerror if isinstance(error, OSError) else error
    remedy = _REMEDY
    if path.name in ADAPTER_FILES:
        remedy = f"an adapter is a folder with {' and '.join(ADAPTER_FILES)} (no pickle is read)"
    elif path.name == _CONFIG or path.suffix in _WEIGHT_SUFFIXES:
        remedy = "a model folder needs this file"
    return ModelError(f"{path}: cannot be read ({why}); {remedy}")


def resolve_model(path: str, revision: str, patterns: Sequence[str]) -> Path:
    """The folder or GGUF file that ``path`` names: a local one, else a Hub id's files that match ``patterns``.

    With ``HF_HUB_OFFLINE=1`` nothing is downloaded. For ORGANIZATION/NAME/FILE.gguf, other weights are not downloaded.
    Raises ModelError, which says how the name was read or which file cannot belong to a model.
    """
    model = Path(path)
    try:
        is_there = model.is_dir() or (is_gguf(model) and os.path.lexists(model))
    except (OSError, ValueError) as error:  # ValueError: a NUL
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"model {shown(path)} cannot be looked up ({why})") from None
    if not is_there:
        model = _from_hub(model, path, revision, patterns)
    check_files(model, patterns)
    return model


def _from_hub(model: Path, path: str, revision: str, patterns: Sequence[str]) -> Path:
    if model.exists():
        raise ModelError(f"model {path} is a file; give the folder it is in, or a .gguf file")
    if is_gguf(model) and not _GGUF_ID.fullmatch(path):
        raise ModelError(f"no file {path} (and one on the Hub is written ORGANIZATION/NAME/FILE.gguf)")
    if path.startswith(".") or not (_REPO_ID.fullmatch(path) or _GGUF_ID.fullmatch(path)):
        raise ModelError(f"no model folder {path} (and a Hub id is written NAME or ORGANIZATION/NAME)")
    if match := _GGUF_ID.fullmatch(path):
        others = [pattern for pattern in patterns if pattern != "*.safetensors"]
        return _download(match[1], revision, [match[2], *others]) / match[2]
    return _download(path, revision, patterns)


def _download(repo_id: str, revision: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    reasons = {
        errors.GatedRepoError: "access to it must be granted: accept its terms on the Hub, then run hf auth login",
        errors.RepositoryNotFoundError: "the Hub has no such model, or it is private and needs hf auth login",
        errors.RevisionNotFoundError: f"the model on the Hub has no revision {revision!r}",
    }
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the client lets connection, proxy and disk errors of several libraries through
        reason = next((text for error_type, text in reasons.items() if isinstance(error, error_type)), "")
        if not reason and constants.HF_HUB_OFFLINE:
            reason = f"revision {revision!r} is not in the Hub's cache, and HF_HUB_OFFLINE forbids to fetch it"
        elif not reason and isinstance(error, errors.LocalEntryNotFoundError):  # not in the cache, and no answer
            why = " ".join(str(error.__cause__ or error).split()).partition(". ")[0]
            reason = f"the Hub cannot be reached ({why[:100]}); check the network, or give a folder on this machine"
        reason = reason or f"it could not be fetched: {' '.join(str(error).split())[:200]}"
        raise ModelError(f"no model folder {repo_id}, and as a Hub id: {reason}") from error
