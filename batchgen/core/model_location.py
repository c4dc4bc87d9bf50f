"""Resolves a model name to a local folder or GGUF file: an existing one, or one in the Hugging Face Hub's cache.

Only files that match the caller's patterns of data formats are downloaded, never pickles or code, and then checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from batchgen.core.errors import ModelError
from batchgen.core.model_files import check_files, is_gguf
from batchgen.core.units import shown

_REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_GGUF_ID = re.compile(r"([\w.-]+/[\w.-]+)/([\w.-]+\.gguf)")


def resolve_model(path: str, revision: str, patterns: Sequence[str]) -> Path:
    """The folder or GGUF file that ``path`` names: a local one, else a Hub id's files that match ``patterns``.

    With ``HF_HUB_OFFLINE=1`` nothing is downloaded. ORGANIZATION/NAME/FILE.gguf is fetched without the repository's
    others. Raises ModelError that says how the name was read, or which file cannot belong to a model.
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

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))
    except errors.GatedRepoError as error:
        reason = "access to it must be granted: accept its terms on the Hub, then run hf auth login"
        raise _not_found(repo_id, reason) from error
    except errors.RepositoryNotFoundError as error:
        raise _not_found(repo_id, "the Hub has no such model, or it is private and needs hf auth login") from error
    except errors.RevisionNotFoundError as error:
        raise _not_found(repo_id, f"the model on the Hub has no revision {revision!r}") from error
    except Exception as error:  # the client lets connection, proxy and disk errors of several libraries through
        if constants.HF_HUB_OFFLINE:
            reason = f"revision {revision!r} is not in the Hub's cache, and HF_HUB_OFFLINE forbids to fetch it"
        elif isinstance(error, errors.LocalEntryNotFoundError):  # not in the cache, and no answer
            why = " ".join(str(error.__cause__ or error).split()).partition(". ")[0]
            reason = f"the Hub cannot be reached ({why[:100]}); check the network, or give a folder on this machine"
        else:
            reason = f"it could not be fetched: {' '.join(str(error).split())[:200]}"
        raise _not_found(repo_id, reason) from error


def _not_found(repo_id: str, reason: str) -> ModelError:
    return ModelError(f"no model folder {repo_id}, and as a Hub id: {reason}")
