"""Addresses of remote files: which are refused, what is shown of them, how the errors of stores are explained."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from repeats import slow

from batchgen.core import remote
from batchgen.core.addresses import check_address, masked, masked_in
from batchgen.core.errors import ExitCode, UsageError
from batchgen.core.remote import READABLE, STILL_S, WRITABLE, RemoteError, attempt, open_store

SECRETS = (
    *("s3://AKIA:hush@bucket/x", "s3://AKIA:hu/sh@bucket/x", "s3://AKIA:hush/x", "gs://hush@bucket/x"),
    *("https://user:hush@host/x", "https://user:hu/sh@host/x", "https://token-hush@host:80/x"),
    "hf://hush@datasets/user/name/x",
)


@pytest.mark.parametrize("address", SECRETS)
def test_an_address_with_a_password_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(ValueError, match="holds a secret") as caught:
        check_address(address, READABLE)
    assert "hu" not in str(caught.value) + masked(address)


@pytest.mark.parametrize(
    "text", ["x_https://h/f?sig=SECRET", "1https://h/f?sig=SECRET", "https://h/f?***01234567#t=SECRET"]
)
def test_a_secret_is_masked_after_a_word_and_after_a_mark(text: str) -> None:
    assert "SECRET" not in masked_in(text)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "https://h/x.jsonl?X-Amz-Signature=hush",
            "https://h/x?code=hush",
            "https://h/x?hush",
            "http://h/x?a=b c=hush",
        ),
        *(
            "https://h/x;sig=hush",
            "https://h/x#access_token=hush",
            "HTTPS://h/x?download=true&se=hush",
            "https://h?hush",
        ),
        *("s3://b/x?X-Amz-Signature=hush", "gs://b/x;sig=hush", "hf://datasets/u/n/x#t=hush", "S3://b/x?a=hush"),
        *("hf:u/n?token=hush", "hf:u/n#hush", "hf:https://u:hush@h/x", "http:/u:hush@h/x", "abfs://b/x?sig=hush"),
    ],
)
def test_what_follows_the_path_of_an_address_is_shown_as_a_digest(address: str) -> None:
    shown = masked(address)
    assert "hush" not in shown and "***" in shown and masked(shown) == shown
    assert masked(address.replace("hush", "other")) != shown or "@" in address
    assert "hush" not in str(UsageError(f"no {address}: try {address}, or '{address}'")) or " " in address


@pytest.mark.parametrize(
    "address",
    [
        *("s3://bucket/a b/x@y:z.jsonl", "s3://bucket/part-?;1#2.jsonl", "gs://bucket", "s3://b/x?versionId=3/L4k"),
        *("s3://arn:aws:s3:us-east-1:1:accesspoint/x", "https://host:8080/x?raw=1&download=true", "http://[::1]:80/x"),
        "hf://datasets/user/name@main/x.parquet",
    ],
)
def test_other_addresses_are_taken_and_shown_as_they_are(address: str) -> None:
    check_address(address, READABLE)
    assert masked(address) == address


@pytest.mark.parametrize(
    "text", ["/data/a:b;c=d?e=f", "x?=1.csv", "data/*.jsonl", "hf:openai/gsm8k?config=main&split=test"]
)
def test_a_path_is_shown_as_it_is(text: str) -> None:
    assert masked(text) == text == str(UsageError(text))


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ftp://host/x", "ftp:// is not supported here; supported: s3://, gs://, hf://$"),
        ("https://host/x", "https:// is not supported"),
        ("file:///etc/passwd", "file:// is not supported"),
        ("s3:///x", "names no bucket"),
        ("s3://a\nb/x", "names no bucket"),
        ("hf://user/name/x", "must be hf://datasets/USER/NAME"),
        ("hf://datasets/name", "must be hf://datasets/USER/NAME"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_reason(address: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_address(address, WRITABLE)


class ClientError(Exception):
    """As botocore makes them."""

    def __init__(self, status: int, code: str = "", message: str = "said") -> None:
        super().__init__(message)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class NoCredentialsError(Exception): ...


class ClientPayloadError(Exception): ...


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ClientError(403, "ExpiredToken"), "refused", r"access is refused \(ExpiredToken: said\); set AWS_PROFILE"),
        (NoCredentialsError("none"), "refused", "no valid credentials"),
        (ClientError(404, "NoSuchBucket"), "no bucket", "no such bucket"),
        (ClientError(404, "NoSuchKey"), "missing", "no such file"),
        (FileNotFoundError("x"), "missing", "no such file"),
        (ClientError(412), "changed", "no longer the same version"),
        (ClientError(503, "SlowDown"), "passing", "keeps answering SlowDown"),
        (urllib.error.URLError(TimeoutError("timed out")), "passing", "cannot be reached"),
        (ClientPayloadError("broke"), "passing", r"breaks off \(broke\)"),
        (ConnectionResetError(104, "reset"), "passing", "breaks off"),
        (OSError(5, "odd\nthing at https://u:hush@host/x?sig=hush"), "other", r"odd thing at https://\*\*\*$"),
    ],
)
def test_an_error_of_a_store_is_one_line_with_what_it_means(
    error: Exception, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WAITS_S", ())

    def fail() -> None:
        raise error

    with pytest.raises(RemoteError, match=rf"cannot read s3://b/x: .*{words}") as caught:
        attempt("read", "s3://b/x", fail)
    assert caught.value.kind == kind
    assert caught.value.exit_code == ExitCode.CRASH
    assert "\n" not in str(caught.value)
    assert "hush" not in str(caught.value)


def test_what_passes_is_tried_again_after_growing_waits_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    answers: list[Any] = [ClientError(503), ConnectionResetError(), TimeoutError(), "content"]

    def call() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert attempt("read", "s3://b/x", call) == "content"
    assert waits == list(remote.WAITS_S[:3]) == sorted(waits)
    answers[:] = [ClientError(403), "content"]
    with pytest.raises(RemoteError):
        attempt("read", "s3://b/x", call)
    answers[:] = [ClientError(500)] * 99
    waits.clear()
    with pytest.raises(RemoteError):
        attempt("read", "s3://b/x", call)
    assert waits == list(remote.WAITS_S)


def test_a_store_that_never_answers_is_given_up_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], []

    def pass_time(seconds: float) -> None:
        clock[0] += seconds

    def call() -> None:
        calls.append(clock[0])
        pass_time(2 * remote.STILL_S)  # the library's own second try included
        raise TimeoutError

    monkeypatch.setattr(remote.time, "sleep", pass_time)
    monkeypatch.setattr(remote.time, "monotonic", lambda: clock[0])
    with pytest.raises(RemoteError, match="cannot be reached") as caught:
        attempt("list", "s3://b/x", call)
    assert caught.value.kind == "passing" and len(calls) > 1
    assert clock[0] <= remote.PATIENCE_S + 2 * remote.STILL_S


def test_no_library_waits_for_an_answer_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import get_session

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    assert open_store("gs://b/x")[0].requests_timeout.sock_read == STILL_S
    assert open_store("s3://b/x")[0].config_kwargs["read_timeout"] == STILL_S
    open_store("hf://datasets/user/name/x")
    assert get_session().timeout.read == STILL_S


@pytest.mark.parametrize(("scheme", "library"), [("s3", "s3fs"), slow("gs", "gcsfs")])
def test_a_library_that_is_not_installed_is_named_with_its_package(scheme: str, library: str) -> None:
    program = (
        f"import sys; sys.modules['{library}'] = None\n"
        f"from batchgen.core.remote import open_store\ntry: open_store('{scheme}://b/x')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"UsageError {scheme}://b/x: {library} is not installed: pip install {library}\n"


def test_a_local_run_imports_no_library_of_remote_files() -> None:
    program = (
        "import sys, batchgen.input.source, batchgen.config.load, batchgen.core.remote; "
        "print({'fsspec', 'aiohttp', 's3fs', 'urllib.request'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("address", ["s3://bucket/folder", "S3://bucket/folder/"])
def test_a_scheme_may_be_written_in_capitals(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimpleNamespace(_strip_protocol=lambda text: text.removeprefix("s3://"))
    monkeypatch.setattr(remote, "_make_store", lambda scheme: store)
    assert open_store(address) == (store, "bucket/folder")
