"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from loopback import pytest_pyfunc_call  # noqa: F401 - a hook
from run_helpers import ENVIRONMENT, JobMaker

# Before torch is imported: a thread that waits for another sleeps. By default it spins, and where the other one's core
# is busy with something else, tests on two threads take five times as long.
for variables in (os.environ, ENVIRONMENT):
    variables.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

# Before Triton is imported, which transformers does too: its mode is settled then, for all tests of the process.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples everywhere, however slow the machine is; --hypothesis-profile=explore looks at others in each run.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="session")
def same_surroundings_everywhere() -> None:
    """80 columns, no debugging, and signals that processes started here do not inherit as ignored or blocked.

    ``nohup`` and a shell's ``&`` ignore some. A handler that does nothing keeps pytest itself as it was started:
    unlike "ignore" it ends with the start of another program.
    """
    for environment in (os.environ, ENVIRONMENT):
        environment["COLUMNS"] = "80"
        environment.pop("BATCHGEN_DEBUG", None)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


@pytest.fixture
def job(tmp_path: Path) -> JobMaker:
    """Makes jobs over rows written to ``tmp_path``; see ``JobMaker``."""
    return JobMaker(tmp_path)


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    """For what sets the threads of its process, which tests share."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
