"""Whatever lies in a model folder, it is used or refused in one line: soon, and in little memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile_folders import NAMES, ODD_FILES, SAMPLE, link
from repeats import SLOW_SHARE
from run_helpers import ENVIRONMENT

from batchgen.config.job import JobSpec
from batchgen.config.load import load_job
from batchgen.core.errors import ModelError, UsageError
from batchgen.core.file_digests import Digests, file_digest
from batchgen.core.model_files import check_files, read_object, resolve_model
from batchgen.model.load import load_model
from batchgen.run.loader import read_model

SCRIPT = Path(__file__).parents[1] / "helpers" / "hostile_folders.py"
PATTERNS = ("*.safetensors", "*.json", "*.jinja")
MAX_GROWTH = 600 << 20  # bytes, over what a good folder takes; nested JSON of the size allowed takes half of it


def outcomes(scratch: Path, seed: int, share: float, what: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), str(scratch), str(seed), str(share), what]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "adapter"])
def test_hostile_folders_are_refused_in_one_line_or_run(tmp_path: Path, what: str) -> None:
    share = max(0.25, SLOW_SHARE)
    good, *hostile = outcomes(tmp_path, 13, share, what)
    assert good["ended"] == "ran", good
    assert len(hostile) > 180 * share
    assert [case for case in hostile if case["ended"] not in ("refused", "ran")] == []
    assert [case for case in hostile if len(case["said"].splitlines()) > 1 or len(case["said"]) > 1000] == []
    assert hostile[-1]["peak_bytes"] < good["peak_bytes"] + MAX_GROWTH


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_regular_file_of_a_sane_size_is_never_opened(tmp_path: Path, name: str, kind: str) -> None:
    ODD_FILES[kind](tmp_path / name)
    with pytest.raises(ModelError) as caught:
        resolve_model(str(tmp_path), "main", PATTERNS)
    assert name in str(caught.value) or str(tmp_path) in str(caught.value)


def test_links_to_regular_files_are_taken_as_in_the_hubs_cache(tmp_path: Path) -> None:
    for file in SAMPLE.iterdir():
        (tmp_path / file.name).symlink_to(os.path.relpath(file, tmp_path))
    check_files(tmp_path, PATTERNS)
    assert read_object(tmp_path / "config.json", 1 << 20) == json.loads((SAMPLE / "config.json").read_text())


UNREAD = ["notes.json", "consolidated.safetensors", "other.jinja"]


@pytest.mark.parametrize("kind", [*ODD_FILES, "a link that leads nowhere"], ids=str)
@pytest.mark.parametrize("name", UNREAD, ids=str)
def test_what_is_not_read_is_neither_refused_nor_part_of_the_fingerprint(tmp_path: Path, name: str, kind: str) -> None:
    spec = job_on(tmp_path)
    known = read_model(spec).files.fingerprint(Digests())
    (ODD_FILES | {"a link that leads nowhere": link("gone")})[kind](tmp_path / name)
    model = read_model(spec)
    digests = Digests()
    assert model.files.fingerprint(digests) == known
    model.files.check_unchanged(digests)


@pytest.mark.parametrize("name", ["generation_config.json", "special_tokens_map.json"])
def test_a_file_that_a_model_may_lack_is_not_called_needed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(ModelError, match=f"{name}: cannot be read .*; make it a readable file, or remove it"):
        resolve_model(str(tmp_path), "main", PATTERNS)


def test_shards_that_the_index_names_are_checked(tmp_path: Path) -> None:
    (tmp_path / "shard-1.safetensors").symlink_to("/dev/zero")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "shard-1.safetensors"}}')
    with pytest.raises(ModelError, match=r"shard-1.safetensors: is a device, not a regular file"):
        resolve_model(str(tmp_path), "main", PATTERNS)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tiny.gguf"])
def test_what_a_clone_without_git_lfs_has_for_a_file_is_named(tmp_path: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
    (tmp_path / name).write_text(pointer)
    model = tmp_path / name if name.endswith(".gguf") else tmp_path
    with pytest.raises(ModelError, match=rf"^{re.escape(str(tmp_path / name))}: is a pointer of Git LFS.*git lfs pull"):
        resolve_model(str(model), "main", PATTERNS)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a single page of memory, which the sample's weights exceed."""
    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else sysconf(name))


@pytest.mark.usefixtures("little_memory")
def test_what_needs_no_weights_reads_a_model_larger_than_the_memory(tmp_path: Path) -> None:
    assert read_model(job_on(tmp_path)).config.vocab_size > 0


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("path", [str(SAMPLE), "dummy:LFM2-350M"])
def test_weights_larger_than_the_memory_are_not_loaded_on_the_cpu(path: str) -> None:
    with pytest.raises(ModelError, match=r"the weights take [\d,]+ bytes in float32, more than this machine's memory"):
        load_model(path, dtype="float32", device="cpu")


def job_on(folder: Path) -> JobSpec:
    """A job with the sample model, linked file by file in ``folder``."""
    for file in SAMPLE.iterdir():
        (folder / file.name).symlink_to(file)
    where: dict[str, dict[str, Any]] = {"input": {"path": ["-"], "prompt": "text"}, "output": {"path": "."}}
    return load_job(None, {"model": {"path": str(folder)}, **where})


@pytest.mark.parametrize("kind", ["a pipe", "an endless device"])
def test_the_digest_of_what_may_never_end_is_not_taken(tmp_path: Path, kind: str) -> None:
    ODD_FILES[kind](tmp_path / "rows.jsonl")
    with pytest.raises(UsageError, match=r"rows.jsonl: not a regular file"):
        file_digest(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "/".join("y" * 300 for _ in range(3))])
def test_a_name_that_no_folder_can_have_is_one_line(name: str) -> None:
    with pytest.raises(ModelError, match="model") as caught:
        resolve_model(name, "main", PATTERNS)
    assert len(str(caught.value)) < 300
