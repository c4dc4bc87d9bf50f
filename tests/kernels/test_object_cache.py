"""What is kept of kernels on disk: found again by the same compiler for the same processor, and never trusted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchgen.kernels import processor
from batchgen.kernels.cpu import build, compiler, object_cache
from batchgen.kernels.cpu.kernel_specs import ARGMAX, COMPILED, RUN_ALL, KernelSpec
from batchgen.kernels.cpu.parallel import Kernel

CODE = bytes(range(256)) * 3
TAKE_MAXIMUM = """
import torch
from batchgen.kernels.cpu.parallel import Kernel
from batchgen.kernels.cpu.kernel_specs import ARGMAX

x, out = torch.tensor([[1.0, 3.0, 2.0]]), torch.empty(1, dtype=torch.int64)
Kernel(ARGMAX).launch(torch.float32, 1, x.data_ptr(), out.data_ptr(), 3)
print(out.tolist())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where objects are kept in a test; none is in memory yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_addresses", {})
    return tmp_path / "batchgen" / "kernels"


@pytest.fixture
def anew() -> Iterator[None]:
    """Digests of sources are taken anew, and not kept."""
    object_cache._sources.cache_clear()
    yield
    object_cache._sources.cache_clear()


def test_what_was_kept_is_found_and_nothing_else_is_left(folder: Path) -> None:
    assert object_cache.read("a.o") is None
    assert object_cache.write("a.o", CODE)
    assert object_cache.read("a.o") == CODE
    assert [path.name for path in folder.iterdir()] == ["a.o"]


@pytest.mark.parametrize("damage", ["cut", "emptied", "longer", "garbled", "renamed"])
def test_an_object_that_is_not_as_it_was_kept_is_none(folder: Path, damage: str) -> None:
    object_cache.write("a.o", CODE)
    path = folder / "a.o"
    content = path.read_bytes()
    if damage == "renamed":
        path.rename(folder / "b.o")
        assert object_cache.read("b.o") is None
        return
    broken = {"cut": content[:-1], "emptied": b"", "longer": content + b"x", "garbled": content[:-1] + b"x"}
    path.write_bytes(broken[damage])
    assert object_cache.read("a.o") is None


def test_a_damaged_object_is_compiled_again_and_replaced() -> None:
    name = object_cache.file_name(ARGMAX, "float32")
    object_cache.write(name, CODE)
    path = next(Path(os.environ["XDG_CACHE_HOME"]).rglob(name))
    path.write_bytes(path.read_bytes()[:-1])
    x, out = torch.tensor([[1.0, 3.0, 2.0]]), torch.empty(1, dtype=torch.int64)
    Kernel(ARGMAX).launch(torch.float32, 1, x.data_ptr(), out.data_ptr(), 3)
    assert out.tolist() == [1]
    assert (object_cache.read(name) or b"").startswith(b"\x7fELF" if sys.platform == "linux" else b"")


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("how", ["writable by all", "writable by a group", "foreign"])
def test_what_others_could_have_written_is_not_loaded(
    folder: Path, what: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_cache.write("a.o", CODE)
    path = folder / "a.o" if what == "file" else folder
    if how != "foreign":
        path.chmod(0o777 if how == "writable by all" else 0o770)
    elif os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert object_cache.read("a.o") is None
    if what == "folder":
        assert not object_cache.is_writable()


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_file_is_no_object(folder: Path, kind: str) -> None:
    object_cache.write("b.o", CODE)
    path = folder / "a.o"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("b.o")
    assert object_cache.read("a.o") is None


def test_whatever_the_umask_objects_are_the_users_own(folder: Path) -> None:
    before = os.umask(0)
    try:
        object_cache.write("a.o", CODE)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "a.o").stat().st_mode & 0o777 == 0o600
    assert object_cache.read("a.o") == CODE


def test_a_full_disk_costs_the_object_alone(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no device that is always full")
    object_cache.write("b.o", CODE)
    (folder / f".a.o.{os.getpid()}").symlink_to("/dev/full")
    assert not object_cache.write("a.o", CODE)
    assert [path.name for path in folder.iterdir()] == ["b.o"]


def test_kernels_run_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not object_cache.is_writable()
    x, out = torch.tensor([[1.0, 3.0, 2.0]]), torch.empty(1, dtype=torch.int64)
    Kernel(ARGMAX).launch(torch.float32, 1, x.data_ptr(), out.data_ptr(), 3)
    assert out.tolist() == [1]


def test_a_user_without_a_home_keeps_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert not object_cache.is_writable()
    assert object_cache.read("a.o") is None
    assert not object_cache.write("a.o", CODE)


@pytest.mark.slow
def test_two_processes_that_compile_at_once_do_not_disturb_each_other(folder: Path) -> None:
    command = [sys.executable, "-c", TAKE_MAXIMUM]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["[1]\n"] * 2
    names = {object_cache.file_name(ARGMAX, "float32"), object_cache.file_name(RUN_ALL, "any")}
    assert {path.name for path in folder.iterdir()} == names


def test_one_process_compiles_at_a_time_and_the_next_takes_over_when_it_ends(folder: Path) -> None:
    ask = "import sys; from batchgen.kernels.cpu.object_cache import lock; print(lock(), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", ask]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "True\n"
        assert not object_cache.lock()
        first.kill()
    assert subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout == b"True\n"
    folder.chmod(0o777)
    assert object_cache.lock(), "where there is no folder to trust, each works for itself"


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    "changed",
    ["compiled/simd.py", "layout.py", "kernel_specs.py", "compiler.py", "numba", "processor", "features", "settings"],
)
def test_what_decides_the_code_decides_the_name(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(Path(object_cache.__file__).parent, tmp_path / "cpu")
    monkeypatch.setattr(object_cache, "__file__", str(copy / "object_cache.py"))
    name = object_cache.file_name(ARGMAX, "float32")
    object_cache._sources.cache_clear()
    assert object_cache.file_name(ARGMAX, "float32") == name
    cpu, features = processor.target()
    if changed == "numba":
        monkeypatch.setattr(object_cache, "version", lambda package: f"1.{package}")
    elif changed == "processor":
        monkeypatch.setattr(processor, "target", lambda: (f"{cpu}-next", features))
    elif changed == "features":
        monkeypatch.setattr(processor, "target", lambda: (cpu, f"{features},+other"))
    elif changed == "settings":
        monkeypatch.setenv("NUMBA_OPT", "1")
    else:
        (copy / changed).write_bytes((copy / changed).read_bytes() + b"\n")
    object_cache._sources.cache_clear()
    assert object_cache.file_name(ARGMAX, "float32") != name


def test_kernels_and_their_kinds_have_names_of_their_own() -> None:
    same_name = KernelSpec(f"{COMPILED}.matmul", "argmax")
    cases = [(ARGMAX, "float32"), (ARGMAX, "bfloat16"), (same_name, "float32")]
    assert len({object_cache.file_name(*case) for case in cases}) == 3


@pytest.mark.slow
def test_an_object_needs_no_numba_to_be_loaded() -> None:
    for source, kind in ((ARGMAX, "float32"), (RUN_ALL, "any")):
        object_cache.write(object_cache.file_name(source, kind), compiler.machine_code(source, kind))
    code = f"{TAKE_MAXIMUM}\nimport sys\nassert 'numba' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[1]\n"), done.stderr[-1000:]
