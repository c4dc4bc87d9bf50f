"""The documents of the package: ``batchgen help`` shows them, the generated ones are current, the others name what is.

Spelling is held by a list of words that these pages do not use; no dictionary is at hand.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import click
import docs
import pytest
from run_helpers import Shell

from batchgen.cli.help import DOCS, INDEX, PACKAGE, Section, find_section, printed, render, sections, text_of
from batchgen.cli.help import PAGES as TOPICS
from batchgen.cli.main import cli
from batchgen.config.job import KEYS
from batchgen.core.errors import RowErrorCode, UsageError

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
# British spellings where American ones are used, words of another language for a standard term, words that say nothing.
FORBIDDEN = (
    "behaviour|colour|favour|honour|neighbour|licence|centre|analyse|catalogue|cancelled|grey|"
    "(?:initial|normal|optim|organ|recogn|serial|summar|token|util)is(?:e|ed|ing|ation)|"
    "simply|obviously|easily|just|please|whoever|nobody|TODO|FIXME|"
    # The glossary: most likely, EOS token, CPU type, next to, after, says, synthetic, reused, embedding, prefix, int8,
    # W8A8, maximum number of, percent of the roofline, instead of, in flight, crashes, URL.
    "likeliest|own end token|kinds? of (?:processor|machine|CPU)|beside|behind|tell|told|telling|made-up|taken over|"
    "vector|beginnings?|8 bit|[Mm]ost (?:tokens|sequences)|shares? of the roofline|roofline share|"
    "in place of|under way|ends (?:its|the|a) worker|address(?:es)?(?! space)"
)
CODE = r"^```.*?^```|`[^`]*`"
SAMPLE = """\
# A page

Words in `code`, [a page](records.md) and [a site](https://example.org), **strongly** wrapped at the width.

## On `resume`

* an item that is as long as two lines of this width are
  - one below

```sh
# no heading
batchgen run job.toml
```

### A table

| key | meaning |
|---|---|
| `a` | one \\| two and then so many words that the cell is wrapped |
"""
SHOWN = """\
A page

  Words in `code`, a page and a site
  (https://example.org), strongly
  wrapped at the width.

On `resume`

  * an item that is as long as two
    lines of this width are
    - one below

    # no heading
    batchgen run job.toml

  A table

    key  meaning
    ---  -----------------------------
    `a`  one | two and then so many
         words that the cell is
         wrapped"""


# Ways to run rows again that are no more: an update does what each of them did.
GONE = r"\b(?:re-?tr(?:y|ies|ied|ying)|mirror\w*|grow|grows|grew|grown|growing|dead letters?)\b|--where\b"


# ---------------------------------------------------------------- batchgen help


def test_help_without_a_topic_lists_every_page_with_a_line(shell: Shell) -> None:
    text = shell("help").out
    for name in PAGES.keys() - {INDEX}:
        assert re.search(rf"^  {name} +[A-Z]", text, re.MULTILINE), name


def test_a_number_that_begins_a_line_of_a_paragraph_is_no_item() -> None:
    lines = ["the code is", "3. Rows run", "* one", "* two", "1. first", "2. second"]
    shown = [line.strip() for line in render(Section("page", 1, lines), 60).splitlines()]
    assert shown == ["the code is 3. Rows run", "* one", "* two", "1. first", "2. second"]


def test_markdown_becomes_text_of_a_width() -> None:
    plain = re.sub(r"\x1b\[\d+m", "", render(next(sections("page", SAMPLE)), 38))
    assert plain == SHOWN
    assert [(section.name, section.level) for section in sections("page", SAMPLE)] == [
        ("page", 1),
        ("On `resume`", 2),
        ("A table", 3),
    ]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_into_80_columns_but_for_its_code(shell: Shell, name: str) -> None:
    text = shell("help", *([] if name == INDEX else [name])).out
    code = {line.strip() for line in PAGES[name].splitlines()}
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if len(line) > 80 and line.strip() not in code] == []


@pytest.mark.parametrize(
    ("topic", "first"),
    [
        ("job-file", "The job file"),
        ("Job File", "The job file"),
        ("max_tokens", "sampling.max_tokens"),
        ("--max-tokens", "sampling.max_tokens"),
        ("engine.kv_cache_memory", "engine.kv_cache_memory"),
        ("too_long", "too_long"),
        ("exit codes", "Exit codes"),
        ("status", "Usage: batchgen status [OPTIONS] DIR"),
    ],
)
def test_a_topic_is_a_page_a_heading_or_a_command(shell: Shell, topic: str, first: str) -> None:
    assert shell("help", *topic.split()).out.splitlines()[0] == first


def test_an_unknown_topic_names_the_nearest_one(shell: Shell) -> None:
    said = shell("help", "operatoins", code=2).err
    assert 'no page, section or command is named "operatoins" (did you mean "operations"?)' in said
    with pytest.raises(UsageError, match=r"\(pages: .*embeddings.*tutorial\)"):
        find_section("zzzz")


def raised_or_said() -> Iterator[str]:
    """The messages of errors and notes that the code makes in place, "7" for what is filled in."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and re.search(r"Error$|Problem$|note$|^say$", ast.unparse(node.func)):
                texts = (text_of(value).replace("…", " 7 ") for value in node.args)
                yield from (text for text in texts if len(re.findall(r"[a-z_]{3,}", text)) > 3)


@pytest.mark.breadth
def test_every_message_that_the_program_prints_is_found() -> None:
    messages = {*raised_or_said()}
    found = {text: printed(text) for text in messages}
    assert len(messages) > 300
    assert [text for text, message in found.items() if message is None] == []


def test_a_message_leads_to_a_page_that_there_is() -> None:
    assert {page: find_section(page, cli.commands).name for page in {*TOPICS.values()} - {*cli.commands}}


def test_the_table_of_messages_comes_first(shell: Shell) -> None:
    text = shell("help", "runs/a is in use by process 7 on host; wait for it or stop it").out
    assert "Another process holds the folder" in text
    assert "found in" not in text
    said = shell("help", "kv_cache_memory 3 bytes holds no block of 9 bytes").out
    assert "is explained by `batchgen help slow`" in said


# ---------------------------------------------------------------- the pages


@pytest.mark.parametrize("name", docs.PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert PAGES[name] == docs.page(name), "python tests/helpers/docs.py writes it"


def test_the_recipes_show_each_job_file_once() -> None:
    assert PAGES["recipes"] == docs.with_jobs(PAGES["recipes"]), "python tests/helpers/docs.py writes it"
    files = [path.read_text(encoding="utf-8") for path in (DOCS.parents[1] / "jobs").glob("*.toml")]
    quickstart = [text for text in files if PAGES["recipes"].count(f"\n\n```toml\n{text}```\n") != 1]
    assert len(quickstart) == 1, "which the README shows how to run"


def test_every_key_code_and_command_has_a_section() -> None:
    names = {section.name for name, text in PAGES.items() for section in sections(name, text)}
    keys = {f"{section}.{key}" for section, found in KEYS.items() for key in found}
    assert keys | {*RowErrorCode} | cli.commands.keys() <= names


@pytest.mark.parametrize("name", PAGES)
def test_every_link_to_a_section_leads_there(name: str) -> None:
    for page, anchor in re.findall(r"\]\(([\w-]*)(?:\.md)?#([^)\s]+)\)", PAGES[name]):
        assert anchor in {slug(found.name) for found in sections(page or name, PAGES[page or name])}, anchor


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", PAGES)
def test_every_key_that_a_page_names_exists(name: str) -> None:
    found = re.findall(rf"`({'|'.join(KEYS)})\.(\w+)`", PAGES[name])
    unknown = {f"{section}.{key}" for section, key in found if key not in KEYS[section]}
    assert unknown - {"input.spool"} == set(), "which is a file of a run"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_written_as_the_others(name: str) -> None:
    prose = re.sub(CODE, "", PAGES[name], flags=re.DOTALL | re.MULTILINE)
    read = PAGES[name] if name == "commands" else prose  # which is the text of help
    assert re.findall(rf"(?<![-./_])\b(?:{FORBIDDEN})s?\b(?![/_]|\.\w)", read) == []
    assert not re.search(r"^#+ [^\n]*\n[^\n]", prose, re.MULTILINE), "a heading has a blank line behind it"
    assert re.match(r"(?:<!--[^\n]*-->\n\n)?# [^\n]+\n\n\S", PAGES[name])
    for table in re.findall(r"(?:^\|[^\n]*\|\n)+", PAGES[name], re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


def test_a_page_is_shown_though_no_pager_can_be(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> None:
        raise ValueError("No closing quotation")  # of PAGER="less 'x"

    monkeypatch.setattr(click, "echo_via_pager", refuse)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert len(shell("help", "recipes").out.splitlines()) > 100


def test_no_page_help_or_recipe_names_a_way_that_is_gone() -> None:
    root = DOCS.parents[1]
    texts = {path.name: path.read_text(encoding="utf-8") for path in (*DOCS.glob("*.md"), root / "README.md")}
    texts |= {path.name: path.read_text(encoding="utf-8") for path in (root / "jobs").iterdir() if path.is_file()}
    found = {name: hits for name, text in texts.items() if (hits := re.findall(GONE, text, re.IGNORECASE))}
    assert found == {}
