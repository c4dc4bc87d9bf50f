"""Runs the tests marked ``ray`` where nothing but this machine can be reached, and nothing can reach them.

A Ray cluster listens on the machine's address, not on 127.0.0.1, and its ports take pickles. So the marked tests of a
session run in a nested pytest, in a network namespace that has a loopback device alone, and each reports what came of
it there. Not a test itself; ``conftest`` has the hook.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

_INSIDE = "BATCHGEN_LOOPBACK"
_MAX_S = 1200  # bounds a failure
_SCRIPT = 'hostname localhost && ip link set lo up && exec "$@"'


def is_inside() -> bool:
    """Whether this process runs in the namespace."""
    return _INSIDE in os.environ


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Report what came of a marked test in the nested run."""
    if is_inside() or pyfuncitem.get_closest_marker("ray") is None:
        return None
    pytest.importorskip("ray")
    items = [item.nodeid for item in pyfuncitem.session.items if item.get_closest_marker("ray")]
    outcome = _outcomes(tuple(items), pyfuncitem.config.rootpath).get(_case(pyfuncitem.nodeid))
    if outcome is None:
        pytest.fail("the nested run ended before this test; see its output above", pytrace=False)
    for kind in ("failure", "error"):
        if (found := outcome.find(kind)) is not None:
            pytest.fail(f"{found.get('message')}\n{found.text}", pytrace=False)
    if (found := outcome.find("skipped")) is not None:
        pytest.skip(str(found.get("message")))
    return True


def _case(node_id: str) -> str:
    """A test's name as in the report of the nested run."""
    path, _, name = node_id.partition("::")
    return f"{path.removesuffix('.py').replace('/', '.')}.{name.replace('::', '.')}"


@functools.cache
def _outcomes(items: Sequence[str], root: Path) -> dict[str, Any]:
    """Run tests in the namespace; what is told of each, by ``_case``. Skips where there can be no namespace."""
    if not _command() or subprocess.run([*_command(), "true"], capture_output=True, check=False).returncode:
        pytest.skip("a network namespace is needed: unshare, ip, and the permission to use them")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-p", "no:cacheprovider", "-m", "ray", f"--junitxml={report}", f"--rootdir={root}"]
        command = [*_command(), sys.executable, "-m", "pytest", *options, *items]
        inside = {**os.environ, _INSIDE: "1"}
        try:
            done = subprocess.run(command, cwd=root, env=inside, capture_output=True, check=False, timeout=_MAX_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the nested run had not ended after {_MAX_S} s", pytrace=False)
        print(done.stdout.decode(), done.stderr.decode())
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        return {f"{case.get('classname')}.{case.get('name')}": case for case in cases}


def _command() -> list[str]:
    """What runs a command in the namespace; empty where its tools are missing."""
    if not all(map(shutil.which, ("unshare", "ip", "hostname"))):
        return []
    mapped = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--net", "--uts", *mapped, "sh", "-c", _SCRIPT, "sh"]
