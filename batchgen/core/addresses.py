"""Addresses of remote files: which ones a job accepts, and how files and messages show them.

A query, parameter or fragment may give access: it is shown as ``***`` with a digest. Passwords are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from hashlib import blake2b

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_START = re.compile(r"(?:hf:(?!//))?(?:([A-Za-z][A-Za-z0-9+.-]+):/+)?")
_IN_TEXT = re.compile(r"(?:\bhf:|[A-Za-z][A-Za-z0-9+.-]+:/+)[^\s'\"]*[^\s'\":;,.)]")
_WEB_TAIL = re.compile(r"[?#;]")
_STORE_TAIL = re.compile(r"[?#;][\w.~%-]+=")  # their names may hold these characters, and a ? is a pattern's
_HIDDEN = re.compile(r"[?#;]\*\*\*[0-9a-f]{8}(?![\w&=])[^?#;&=]*")
_OPEN_VALUE = r"(?:config|split|revision|versionId)=[^&#;]*|(?:download|raw|dl)=(?:true|false|[01])|v=[\d.]+"
_OPEN = re.compile(rf"\?(?:{_OPEN_VALUE})(?:&(?:{_OPEN_VALUE}))*")  # a query that names a file and opens none
_SECRET_VARIABLE = re.compile(r"(?i)(.*_)?(token|secret|password|passwd|credentials?|(api|access)_?key)(_.*)?")
_SIGN_IN = {
    "s3": "set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (a public bucket: FSSPEC_S3_ANON=true)",
    "gs": "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "run hf auth login, or set HF_TOKEN",
}


def scheme_of(text: str) -> str | None:
    """The scheme of an address in lower case; None for a path."""
    match = _ADDRESS.match(text)
    return match[1].lower() if match else None


def prefix_of(text: str) -> str:
    """The start that makes a text an address: ``https://``, ``hf:``, or ``https:/`` with one slash missing; else ""."""
    match = _START.match(text)
    return match[0] if match else ""


def check_address(text: str, schemes: Collection[str]) -> None:
    """Raises ValueError, whose text follows "<key> = <value>: ", for an address that cannot be used.

    It refuses other schemes than ``schemes``, passwords, and addresses without a file or folder.
    """
    scheme = scheme_of(text)
    supported = ", ".join(f"{name}://" for name in schemes)
    if scheme not in schemes:
        raise ValueError(f"{scheme}:// is not supported here; supported: {supported}")
    if _has_password(text):
        raise ValueError(f"holds a secret, which would be written to job.json: leave it out and {sign_in(scheme)}")
    rest = text.partition("://")[2]
    host, _, path = rest.partition("/")
    if not host or (scheme != "hf" and host.startswith(".")) or not text.isprintable() or " " in host:
        raise ValueError(f"names no {'server' if scheme in ('http', 'https') else 'bucket'}")
    if scheme == "hf" and (host != "datasets" or len([part for part in path.split("/") if part]) < 2):
        raise ValueError("must be hf://datasets/USER/NAME/FILE, or @REVISION after NAME")


def sign_in(scheme: str | None) -> str:
    """Advice on how to give a store its credentials."""
    return _SIGN_IN.get(scheme or "", "fetch the file to this machine, or read it through s3://, gs:// or hf://")


def refusal_of_variable(name: str) -> str:
    """The reason why a job may not contain an environment variable: its name says that it is a secret; "" if it may."""
    if not _SECRET_VARIABLE.fullmatch(name):
        return ""
    why = f"{name} seems to hold a secret, which would be written to job.json and copied with it"
    return f"{why}: leave it out (the tools of AWS, Google and the Hub find their credentials by themselves)"


def bare(address: str) -> str:
    """An address without its query, parameters and fragment."""
    prefix = prefix_of(address)
    marks = _WEB_TAIL if prefix.lower().endswith("hf:") or "http" in prefix.lower() else _STORE_TAIL
    tail = marks.search(address, len(prefix)) if prefix else None
    return address[: tail.start()] if tail else address


def masked(address: str) -> str:
    """An address as files and messages show it; paths and masked addresses stay unchanged.

    A query, parameters or a fragment become ``***`` and eight hex digits of their digest. If there is a password, only
    the scheme is shown.
    """
    if _has_password(address):
        return f"{prefix_of(address)}***"
    plain = bare(address)
    tail = address[len(plain) :]
    if not tail or _OPEN.fullmatch(tail) or _HIDDEN.fullmatch(tail):
        return address
    return f"{plain}{tail[0]}***{blake2b(tail.encode(), digest_size=4).hexdigest()}"


def masked_in(text: str) -> str:
    """A text with the addresses in it masked."""
    return _IN_TEXT.sub(lambda match: masked(match[0]), text)


def is_masked(address: str) -> bool:
    """Whether an address was masked, so that it can no longer be opened."""
    return bool(_HIDDEN.search(address))


def _has_password(address: str) -> bool:
    """Whether an address may contain a user and a password: ``user:password@``, ``key:secret``."""
    start = _START.match(address)
    if start is None or not start[1]:
        return False
    host = re.split(r"[/?#]", address[start.end() :], maxsplit=1)[0]
    _, colon, port = re.sub(r"\[.*\]", "", host).partition(":")
    return "@" in host or bool(colon and not port.isdecimal() and not host.startswith("arn:"))
