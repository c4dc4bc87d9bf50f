"""The pages written by hand say what the program does: their commands run, word for word, and print what is shown."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repeats import slow
from run_helpers import REPOSITORY

from batchgen.cli.main import call, cli
from batchgen.engine.self_test import cache_folder
from batchgen.output.rundir import RunDir
from batchgen.report import build

DOCS = REPOSITORY / "batchgen" / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted((REPOSITORY / "jobs").iterdir())]
WIDTH = 76  # of a line of code: a page is shown at 80 columns


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """The code blocks of a page, each with its language."""
    yield from re.findall(r"^```(\w+)\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(commands: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What commands print; the lines of batchgen's run in this process, others in a shell."""
    for part in re.split(r"^(?=batchgen )", commands, flags=re.MULTILINE):
        if part.startswith("batchgen "):
            assert call(shlex.split(part.replace("\\\n", " "))[1:]) in (0, 3)
        elif part:
            subprocess.run(part, shell=True, check=True)
    return "".join(capfd.readouterr())


def masked(text: str) -> list[str]:
    """Its lines with all numbers alike: times and speeds differ."""
    return [re.sub(r"\d[\d.,]*", "#", line) for line in text.splitlines()]


def without_times(record: str) -> dict[str, Any]:
    """A record without what differs from run to run, times and the folder, nor the digits of its fingerprint.

    These change with each new key of sampling.
    """
    found: dict[str, Any] = json.loads(record)
    found["fingerprint"] = len(found.get("fingerprint", ""))
    return {name: sorted(value) if name in ("timings", "source") else value for name, value in found.items()}


@pytest.mark.parametrize("page", ["tutorial", slow("exactness")])
def test_the_commands_of_a_page_run_word_for_word_and_print_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sample_data").symlink_to(REPOSITORY / "sample_data")
    monkeypatch.chdir(tmp_path)
    said = ""
    for language, text in blocks(f"{page}.md"):
        if language == "sh":
            said = run(text, capfd)
        elif language == "json":
            assert without_times(text) == without_times(said.replace(f"{tmp_path}/", ""))
        else:
            lines = iter(masked(said))
            assert [line for line in masked(text) if line not in lines] == [], said


def test_the_tree_of_a_run_directory_has_all_its_files() -> None:
    tree = next(text for _, text in blocks("operations.md") if "job.json" in text)
    known = {path.name for path in vars(RunDir(Path("out"))).values() if isinstance(path, Path)} - {"out"}
    assert known <= {*re.findall(r"^ +([\w.]+)/? ", tree, re.MULTILINE)}


def test_each_thing_that_bounds_a_run_has_a_remedy() -> None:
    page = (DOCS / "slow.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)) - {"bound by"}
    assert listed == {*build._WORK.values(), "KV memory", "too few rows at a time"}


def test_every_recipe_is_on_the_page() -> None:
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    files = {path.name for path in (REPOSITORY / "jobs").iterdir()} - {"quickstart.toml"}
    assert set(re.findall(r"`jobs/([\w.]+)`", page)) == files


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_flag_that_is_shown_exists(path: Path) -> None:
    text = re.sub(r"\\\\?\n(#|\s)*", " ", path.read_text(encoding="utf-8"))
    for name, rest in re.findall(rf"\bbatchgen ({'|'.join(cli.commands)})\b([^\n`|&;]*)", text):
        options = {option for item in cli.commands[name].params for option in (*item.opts, *item.secondary_opts)}
        assert {*re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest.partition(" #")[0])} <= options | {"--help"}, rest


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_a_page_fits_a_terminal_and_its_links_lead_somewhere(path: Path) -> None:
    code = "".join(text for language, text in blocks(path.name) if language != "toml")
    assert [line for line in code.splitlines() if len(line) > WIDTH] == []
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (DOCS / link).exists()] == []


def test_the_page_of_questions_names_messages_that_there_are() -> None:
    page = (DOCS / "faq.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    code = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "batchgen").rglob("*.py"))
    of_the_system = {os.strerror(errno.ENOSPC)}
    assert listed and [message for message in listed if message not in code and message not in of_the_system] == []


def test_the_python_shown_prints_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    said = re.findall(r"^```python\n(.*?)^```\n\n(It prints [^\n]+)", page, re.MULTILINE | re.DOTALL)
    for text, prints in said:
        exec(text, {})
        assert capsys.readouterr().out.splitlines() == re.findall(r"`(\d [A-Z]+)`", prints) != []
    assert len(said) == page.count("```python")


def test_the_page_on_operations_names_each_place_that_uninstalling_leaves_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (DOCS / "operations.md").read_text(encoding="utf-8")
    section = page.split("## Uninstall")[1].split("## ")[0]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert f"`~/{cache_folder().relative_to(tmp_path)}/`" in section
    for name in ("TMPDIR/batchgen-*/", "TMPDIR/batchgen-*.txt", "HF_HOME", "XDG_CACHE_HOME/batchgen/"):
        assert f"`${name}" in section
