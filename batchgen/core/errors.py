"""Exceptions and exit codes of the package.

A problem of the *job* is an exception; a problem of one *row* is a value (``RowError``) that is written to
``errors.jsonl`` and never stops the run.

    BatchgenError            exit 1   a fault of this package
    ├── OutOfMemory          exit 1   the machine's memory or a limit on it is exhausted
    ├── StorageError         exit 1   the run directory cannot be written or read: disk full, damaged, no permission
    ├── RemoteError          exit 1   a file at an address cannot be read or written: network, credentials, no such file
    ├── UsageError           exit 2   wrong flag, job file, input path; nothing was written
    │   ├── ModelError       exit 2   a model folder, config, tokenizer or weights file is unusable
    │   └── ResumeMismatch   exit 2   the run directory belongs to a different job
    ├── InputError           exit 2   an input changed or became unreadable during the run; finished rows stay
    ├── RunStopped           exit 75  the run was stopped before its last row; running it again continues it
    ├── GateFailed           exit 4   plan --fail-if-over, report --compare, check
    └── LockedError          exit 5   another process holds the run directory
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Literal, Self

from batchgen.core.addresses import masked_in


class ExitCode(IntEnum):
    """Process exit codes; scripts depend on them. ``todo`` is what a script should do."""

    meaning: str
    todo: str

    OK = 0, "All rows are done.", "Use the outputs."
    CRASH = 1, "batchgen or the machine failed, such as a full disk.", "Fix the cause, then run it again."
    USAGE = 2, "The job or command cannot work, or the folder is another job's.", "Stop: it would fail again."
    ROWS_FAILED = 3, "Finished with failed rows, or stopped by --max-error-rate.", "See errors.jsonl; use any outputs."
    GATE_FAILED = 4, "A gate of plan, report or check did not pass.", "Fail the pipeline."
    LOCKED = 5, "Another process runs in this folder.", "Wait until that process ends."
    STOPPED = 75, "Stopped early by a signal, a deadline or a limit.", "Run the same command again: it resumes."

    def __new__(cls, value: int, meaning: str = "", todo: str = "") -> Self:
        member = int.__new__(cls, value)
        member._value_, member.meaning, member.todo = value, meaning, todo
        return member


class BatchgenError(Exception):
    """Base of all errors this package raises on purpose; ``str()`` is one clear line for a person."""

    exit_code: ExitCode = ExitCode.CRASH

    def __init__(self, message: str = "") -> None:
        super().__init__(masked_in(message))


class OutOfMemory(BatchgenError):
    """Memory is exhausted; journalled rows stay, and the run resumes on a machine that has more."""


class StorageError(BatchgenError):
    """The run directory cannot be written or read back; journalled rows stay, and the run resumes."""


RemoteKind = Literal["missing", "no bucket", "refused", "changed", "passing", "other"]


class RemoteError(BatchgenError):
    """A remote file cannot be read or written; finished rows stay, and the run resumes.

    ``kind`` is what a caller may act on: ``missing`` (no such file), ``no bucket``, ``refused`` (credentials),
    ``changed`` (a precondition did not hold), ``passing`` (it was tried several times) or ``other``.
    """

    def __init__(self, message: str, kind: RemoteKind = "other") -> None:
        super().__init__(message)
        self.kind: RemoteKind = kind


class UsageError(BatchgenError):
    """The command, the job file or its input cannot work as given."""

    exit_code = ExitCode.USAGE


class ModelError(UsageError):
    """The model cannot be loaded: no such folder, another architecture, corrupt or missing tensors."""


class ResumeMismatch(UsageError):
    """The run directory was begun by a job whose outputs would differ."""


class InputError(BatchgenError):
    """A file has changed since the run began, or can no longer be read; the run ends and its finished rows stay."""

    exit_code = ExitCode.USAGE


class RunStopped(BatchgenError):
    """The run has ended before its last row; journalled rows stay, and it can be resumed if its directory is kept."""

    exit_code = ExitCode.STOPPED


class GateFailed(BatchgenError):
    """A gate the user asked for did not pass."""

    exit_code = ExitCode.GATE_FAILED


class LockedError(BatchgenError):
    """Another process holds the run directory."""

    exit_code = ExitCode.LOCKED


class TokenizerError(Exception):
    """The tokenizer fails on one text or on the tokens of one row; callers turn it into a ``RowError``."""


class RowErrorCode(StrEnum):
    """Stable codes of ``errors.jsonl``; ``remedy`` is what to change before the next run."""

    meaning: str
    remedy: str

    BAD_JSON = "bad_json", "The line is not valid JSON.", "Put the correct JSON object into `row`."
    MISSING_COLUMN = "missing_column", "The row lacks a column that it needs.", "Add the column to `row`."
    BAD_TYPE = "bad_type", "A value has the wrong type, such as a list for a text.", "Correct the value in `row`."
    EMPTY_PROMPT = "empty_prompt", "The prompt has no text or no tokens.", "Fill in the column of the prompt."
    BAD_PARAM = "bad_param", "A sampling value is unknown or impossible.", "Correct or remove the value in `row`."
    DUPLICATE_ID = "duplicate_id", "An earlier row has the same id.", "Give `row` an id of its own."
    TOO_LONG = (
        "too_long",
        "The prompt exceeds the context or the KV memory.",
        "Shorten it, or run with larger limits and `--update`.",
    )
    BAD_ENCODING = "bad_encoding", "The line is not valid UTF-8.", "Put the correct JSON object into `row`."
    TEMPLATE_ERROR = (
        "template_error",
        "The template fails on this row, or would not show all of it.",
        "Change what the message names in `row`.",
    )
    INTERNAL = (
        "internal",
        "batchgen or the machine failed at the row.",
        "Run the job with `--update`; if it fails again, report a bug.",
    )

    def __new__(cls, value: str, meaning: str = "", remedy: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_, member.meaning, member.remedy = value, meaning, remedy
        return member


NOT_READ = "not read as rows"  # in the message of a row that contains other rows' lines; counts do not show these


@dataclass(frozen=True, slots=True)
class RowError:
    """Cause of a row without a result: a stable ``code`` and a sentence that names the column and the value."""

    code: RowErrorCode
    message: str
