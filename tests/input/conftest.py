"""Fixtures of the tests of input: a tokenizer, and places for remote files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import fsspec
import pytest
from input_helpers import loaded
from remote_servers import Remote, remote_of, settle

from batchgen.core import remote
from batchgen.text.tokenizer import Tokenizer

os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # which speaks gRPC to Google before anything else


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    return loaded()


@pytest.fixture(scope="package")
def places() -> Iterator[Callable[[str], Remote]]:
    """One server of each kind for all tests, started when it is first asked for."""
    with ExitStack() as stack:
        made: dict[str, Remote] = {}

        def place(kind: str) -> Remote:
            if kind not in made:
                made[kind] = stack.enter_context(remote_of(kind))
                for name in ("gs", "hf"):  # which keep what another server of other tests said
                    fsspec.get_filesystem_class(name).clear_instance_cache()
            return made[kind]

        yield place


@pytest.fixture
def place(places: Callable[[str], Remote], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Remote:
    found = places(request.param)
    if found.server is not None:
        found.server.reset()
    settle(request.param, found.url, monkeypatch)
    monkeypatch.setattr(remote, "WAITS_S", (0.01, 0.02))
    return found
