"""Addresses of remote files (``s3://``, ``gs://``, ``hf://``, ``https://``), their stores in fsspec, and their faults.

Credentials come from the libraries' own places, never from an address; transient errors are retried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

from batchgen.core.addresses import bare, is_masked, masked, masked_in, scheme_of, sign_in
from batchgen.core.errors import BatchgenError, RemoteKind, UsageError
from batchgen.core.errors import RemoteError as RemoteError  # noqa: PLC0414 - what callers of this module catch
from batchgen.core.units import printable, shortened

T = TypeVar("T")
READABLE = ("s3", "gs", "hf", "https", "http")
WRITABLE = ("s3", "gs", "hf")
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 16.0)  # before each retry after a transient error
PATIENCE_S = 60.0  # after this time it is not retried
STILL_S = 15.0  # how long a server may be silent

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_REFUSED = frozenset({400, 401, 403})
# Errors of libraries that are not imported here, by the names of their types and base types.
_UNREACHED = {"HTTPClientError", "ClientConnectionError", "ClientPayloadError", "TransportError", "RequestException"}
_UNREACHED |= {"FSTimeoutError", "IncompleteRead", "IncompleteReadError", "URLError", "ResponseParserError"}
_UNREACHED |= {"ConnectionError", "TimeoutError", "HTTPException"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}
_NO_CREDENTIALS |= {"SSOError", "LoginError", "ProfileNotFound", "DefaultCredentialsError", "RefreshError"}
_FORBIDDEN = {"PermissionError", "GatedRepoError"}
_MISSING = {"FileNotFoundError", "EntryNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError"}
_BUSY = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout"}
# These print tracebacks of errors that are explained here.
_NOISY = ("aiobotocore", "asyncio", "botocore", "fsspec", "gcsfs", "huggingface_hub", "s3fs")


def open_store(address: str) -> tuple[Any, str]:
    """The ``fsspec.AbstractFileSystem`` of an address, without a cache of listings, and the path in it.

    Raises UsageError if its library is not installed, RemoteError if it cannot be set up.
    """
    scheme = str(scheme_of(address))
    if is_masked(address):
        raise UsageError(f"{address}: the part *** may be a secret and is not stored: give the address with --input")
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with explained_errors("open", address):
        try:
            store = _make_store(scheme)
        except ImportError:
            package = {"s3": "s3fs", "gs": "gcsfs"}.get(scheme, "huggingface_hub")
            raise UsageError(f"{masked(address)}: {package} is not installed: pip install {package}") from None
        lower = scheme + address[len(scheme) :]  # stores only accept schemes in lower case
        return store, str(store._strip_protocol(lower)).rstrip("/")


def _make_store(scheme: str) -> Any:
    import fsspec

    if scheme == "hf":
        from huggingface_hub import get_session
        from huggingface_hub.utils.tqdm import disable_progress_bars

        get_session().timeout = STILL_S  # by default most requests wait forever
        disable_progress_bars()  # the run has its own display
        return fsspec.filesystem("hf")
    if scheme in ("gs", "http", "https"):
        import aiohttp

        limits = aiohttp.ClientTimeout(None, sock_connect=STILL_S, sock_read=STILL_S)
        if scheme == "gs":
            return fsspec.filesystem("gs", use_listings_cache=False, requests_timeout=limits)
        return fsspec.filesystem(scheme, client_kwargs={"timeout": limits, "trust_env": True})  # its proxies
    tries = {"mode": "standard", "total_max_attempts": 2}  # ``attempt`` makes all others, under its own limit
    config = {"retries": tries, "connect_timeout": STILL_S, "read_timeout": STILL_S}
    store = fsspec.filesystem("s3", use_listings_cache=False, config_kwargs=config)
    store.retries = 1
    return store


def attempt(doing: str, address: str, call: Callable[[], T]) -> T:
    """Result of ``call``, which is called again after growing waits, for a minute, while its errors are transient.

    ``doing`` completes "cannot <doing> <address>". Raises RemoteError; BatchgenErrors of ``call`` are not retried
    unless they are RemoteErrors of kind "passing".
    """
    began_at = time.monotonic()
    for wait_s in chain(WAITS_S, (None,)):
        try:
            with explained_errors(doing, address):
                return call()
        except RemoteError as error:
            if error.kind != "passing" or wait_s is None or time.monotonic() - began_at + wait_s > PATIENCE_S:
                raise
            time.sleep(wait_s)
    raise AssertionError("unreachable")


@contextmanager
def explained_errors(doing: str, address: str) -> Iterator[None]:
    """Turn what a store's library raises inside the block into a RemoteError of one line."""
    try:
        yield
    except BatchgenError:
        raise
    except Exception as error:  # several libraries, each with dozens of types
        kind, why = _explanation(error, address)
        raise RemoteError(f"cannot {doing} {masked(address)}: {why}", kind) from error


@contextmanager
def refusals_as_usage() -> Iterator[None]:
    """Turn a lasting RemoteError into a UsageError (exit 2) before a run begins; a transient one stays."""
    try:
        yield
    except RemoteError as error:
        if error.kind == "passing":
            raise
        raise UsageError(str(error)) from error


def _explanation(error: BaseException, address: str) -> tuple[RemoteKind, str]:
    """The kind of a store's error (see ``RemoteError``), and a message for the user."""
    scheme = scheme_of(address)
    causes = _causes(error)
    names = {base.__name__ for cause in causes for base in type(cause).__mro__}
    is_torn = "ClientPayloadError" in names  # its cause has a status that does not come from a server
    status = None if is_torn else next(filter(None, map(_status, causes)), None)
    code = next(filter(None, map(_code, causes)), "")
    text = _message(causes[0], address[len(bare(address)) :])
    busy = f"the server keeps answering {code or status}; try later"
    refusal = f"access is refused ({code or status or 'forbidden'}: {text}); {sign_in(scheme)}"
    meanings: list[tuple[bool, RemoteKind, str]] = [
        ("OfflineModeIsEnabled" in names, "refused", "HF_HUB_OFFLINE forbids it; hf:NAME reads from the Hub's cache"),
        (bool(names & _NO_CREDENTIALS), "refused", f"no valid credentials ({text}); {sign_in(scheme)}"),
        (status == 412 or "FileExpired" in names, "changed", "it is no longer the same version"),
        (code == "NoSuchBucket", "no bucket", "there is no such bucket"),
        (code in _BUSY, "passing", busy),  # some of them with the status of a wrong request
        (status in _REFUSED or bool(names & _FORBIDDEN) or text.startswith("Forbidden"), "refused", refusal),
        (status in (404, 410), "missing", "there is no such file"),
        (status in _PASSING, "passing", busy),
        (bool(names & _UNREACHED), "passing", f"the server cannot be reached, or breaks off ({text}); try later"),
        (bool(names & _MISSING), "missing", "there is no such file"),  # the web's, whatever its cause
    ]
    return next(((kind, why) for holds, kind, why in meanings if holds), ("other", text))


def _causes(error: BaseException) -> list[BaseException]:
    """The error and its causes, the outermost first."""
    causes: list[BaseException] = []
    while error not in causes and len(causes) < 10:
        causes.append(error)
        if error.__cause__ is None:
            break
        error = error.__cause__
    return causes


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of any of the libraries carries."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return int(response) if response else None
    for owner, name in ((response, "status_code"), (error, "status"), (error, "code")):
        if str(status := getattr(owner, name, None)).isdecimal():
            return int(str(status))
    return None


def _code(error: BaseException) -> str:
    """The error code of S3, such as "NoSuchBucket"."""
    response: Any = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _message(error: BaseException, hidden: str) -> str:
    """The message in one line, without ``hidden``, the query of the address."""
    text = str(error).replace(hidden, "?***") if hidden else str(error)
    text = printable(masked_in(" ".join(text.split())))
    return shortened(text or type(error).__name__, 200).rstrip(".")
