"""Fixtures of the tests of text."""

from __future__ import annotations

import pytest
from guides import sample_grammars

from batchgen.text.grammar import Grammars


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return sample_grammars()
