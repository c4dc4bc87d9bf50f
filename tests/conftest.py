"""Fixtures shared by all tests, and ``PROMISE``: the files that plain ``pytest`` runs, since they prove the promise.

All others are marked ``breadth`` and run in CI, or where a folder or file is named: ``pytest tests/ROOM``.

Helpers (tests/helpers): run_helpers and stub_engine for whole runs without a model, tiny_model and families for random
models, kernel_cases for every back end, fault_injection, power_loss, fault_runs and storm_runs for crashes.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from loopback import pytest_pyfunc_call  # noqa: F401 - a hook
from repeats import mark_repeats

if TYPE_CHECKING:
    from run_helpers import JobMaker, Shell

# The same for processes started here: ``run_helpers`` copies the environment when it is imported.
os.environ["COLUMNS"] = "80"
os.environ.pop("BATCHGEN_DEBUG", None)
# Before torch is imported: a thread that waits for another sleeps. By default it spins, and where the other one's core
# is busy with something else, tests on two threads take five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def has_gpu() -> bool:
    """Whether torch can use a GPU; it is imported only where there is a driver, as one test needs no torch."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():  # the second one: under WSL
        return False
    import torch

    return torch.cuda.is_available()


# Before Triton is imported, which transformers does too: its mode is settled then, for all tests of the process.
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples everywhere, however slow the machine is; --hypothesis-profile=explore looks at others in each run.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


PROMISE = {  # by room, the files that hold it; "*": all
    # The same tokens: batched as alone, chunked as whole, resumed as uninterrupted, and those of transformers.
    "equivalence": "*",
    "model": "families mixtures",
    "kernels": "attention experts linear mask parallel quantize rope_conv rows sampling_kernel shared_prefixes",
    # No row lost, none twice.
    "output": "durability journal rundir writer",
    "run": "crashes custom_ids histories identity kill_points loaded_engine merge resume run signals stdin stop update",
    # The scheduler.
    "engine": "admission block_pool build_input duplicates engine penalties sampler scheduler scheduler_sharing "
    "sequence sizes",
    # The prompt is what the user wrote, and a bad row costs itself alone.
    "input": "bad_inputs changed_input chat_columns chat_formats columns prompt reader reader_properties",
    # The contract.
    "cli": "cli docs documents job_argument pages synonyms terminal",
    "config": "keys params spec",
    "report": "report report_compare",
    "plan": "*",
    "check": "*",
    "tests": "house",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """No processes beside this one where single files or tests are named: they would be ready later than the tests."""
    is_named = config.args_source is pytest.Config.ArgsSource.ARGS
    return 0 if is_named and all(Path(name.partition("::")[0]).is_file() for name in config.args) else None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A test that is named, as in ``pytest path::test``, runs whatever its marks, unless ``-m`` is given."""
    if config.option.markexpr in config.getini("addopts") and config.args and all("::" in name for name in config.args):
        config.option.markexpr = ""


def holds_promise(file: Path) -> bool:
    files = PROMISE.get(file.parent.name, "")
    return files == "*" or file.stem.removeprefix("test_") in files.split()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Plain ``pytest`` imports no file of which it would run nothing: that takes as long as many tests."""
    is_plain = config.option.markexpr in config.getini("addopts")
    is_named = config.args_source is pytest.Config.ArgsSource.ARGS
    is_test = collection_path.name.startswith("test_")
    return True if is_plain and not is_named and is_test and not holds_promise(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Garbage is neither looked for meanwhile nor, later, among the modules, which stay."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """At the end of the process modules are garbage too: nanobind prints what is left of Triton then."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_named = config.args_source is pytest.Config.ArgsSource.ARGS
    is_interpreted = "TRITON_INTERPRET" in os.environ
    for item in items:
        repeats = item.get_closest_marker("further") or (is_interpreted and item.get_closest_marker("interpreted"))
        if not is_named and (repeats or not holds_promise(item.path)):
            item.add_marker(pytest.mark.breadth)
    mark_repeats(items, is_interpreted)


@pytest.fixture(autouse=True, scope="session")
def same_surroundings_everywhere() -> None:
    """Signals that processes started here do not inherit as ignored or blocked; ``nohup`` and ``&`` ignore some.

    A handler that does nothing keeps pytest itself as it was started: unlike "ignore" it ends with the start of another
    program.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


@pytest.fixture
def job(tmp_path: Path) -> JobMaker:
    """Makes jobs over rows written to ``tmp_path``; see ``JobMaker``."""
    from run_helpers import JobMaker

    return JobMaker(tmp_path)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    """Runs commands; see ``Shell``."""
    from run_helpers import Shell

    return Shell(capsys)


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    """For what sets the threads of its process, which tests share."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing, for tests that sync thousands of times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)
