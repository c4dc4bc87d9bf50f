"""The ``help`` command: pages of ``batchgen/docs``, sections of them, the help of other commands, and messages.

Pages are Markdown files in the package; only the elements that they use are supported. Messages are all string literals
of the package, found by their constant parts.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import click

from batchgen.config.job import KEYS
from batchgen.core.errors import UsageError
from batchgen.core.keys import resembling
from batchgen.core.synonyms import synonym_of

DOCS = Path(__file__).parents[1] / "docs"
INDEX = "README"  # the page that lists all others
_LAST_PAGES = ("changelog", "contributing", "internals", "performance")
_MAX_WIDTH = 80
_HEADING = re.compile(r"(#+) (.+)")
_ITEM = re.compile(r" *(?:[*-]|\d+\.) ")
_BLOCK = re.compile(  # code, a heading, a table, an item, a paragraph (in which a list begins with 1.), a blank line
    r"^```[\s\S]*?^```$|^#.*$|^\|.*$(?:\n\|.*$)*"
    r"|^ *(?:[*-]|\d+\.) .*$(?:\n(?! *(?:[*-]|\d+\.) |```|#|$).*)*|^.+$(?:\n(?! *(?:[*-]|1\.) |```|#|$).*)*|^$",
    re.MULTILINE,
)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_FENCE = "```"
PACKAGE = Path(__file__).parents[1]
PAGES = {  # the page or heading for messages of a room or module; the longest name wins
    **{"": "faq", "api": "python", "llm": "python", "lm_eval": "evaluate with lm-evaluation-harness"},
    **{"bench": "bench", "check": "test it on your machine", "cli": "commands", "config": "job-file"},
    **{"config/cluster": "[cluster]", "config/sampling": "[sampling]"},
    **{"core/gguf": "models", "core/model": "models", "core/remote": "credentials", "core/structured": "extract"},
    **{"core/units": "shards", "engine": "slow", "kernels": "gpus"},
    **{"input": "rows that fail", "input/formats": "[input]", "input/columns": "[input]", "input/source": "[input]"},
    **{"input/openai_batch": "openai batch files", "input/requests": "error codes", "model": "models"},
    **{"output": "the run directory", "output/publish": "copies", "plan": "plan", "report": "report", "run": "updates"},
    **{"run/merge": "shards", "run/stdin": "standard input", "run/loader": "models", "run/vectors": "embeddings"},
    **{"text": "structured_outputs", "text/chat": "template_error", "text/gguf": "models", "text/tokenizer": "models"},
    **{"text/template": "template_error", "text/tool_calls": "parse", "workers": "workers", "workers/ray": "ray"},
}
_MIN_WORDS = 2
_ROW = re.compile(r"\| `([^`]+)` \|")


class Section(NamedTuple):
    """A heading of a page and the lines up to the next heading of its level; a page is named after its file."""

    name: str
    level: int
    lines: Sequence[str]


@click.command("help", context_settings={"ignore_unknown_options": True})
@click.argument("topic", nargs=-1, metavar="[TOPIC]")
@click.pass_context
def help_command(ctx: click.Context, topic: Sequence[str]) -> None:
    """Show a page of the documents, or what a command or message means.

    Without TOPIC, lists the pages. TOPIC is a page, a command, a message, or words of a heading: keys of the job file
    and codes of errors.jsonl are headings too.

    \b
    Examples:
      batchgen help tutorial
      batchgen help run
      batchgen help exit codes
      batchgen help max_tokens
      batchgen help is in use by
    """
    group = ctx.find_root().command
    commands = group.commands if isinstance(group, click.Group) else {}
    name, about = " ".join(topic), ""
    section, _, key = name.partition(".")
    if name not in commands and not is_heading(name) and (synonym := synonym_of(key if section in KEYS else name)):
        about, name = f"{name}: {synonym.note}." if synonym.note else "", synonym.topic
    if name in commands:
        text = commands[name].get_help(click.Context(commands[name], info_name=name, parent=ctx.parent))
        click.echo(f"{about}\n\n{text}" if about else text)
        return
    columns, rows = shutil.get_terminal_size()
    width = min(columns, _MAX_WIDTH)
    text = render(find_section(name, commands), width)
    if about:
        text = f"{textwrap.fill(about, width)}\n\n{text}"
    is_long = sys.stdout is not None and sys.stdout.isatty() and text.count("\n") >= rows
    if is_long:
        with suppress(ValueError):  # PAGER may be a text that no shell could read
            click.echo_via_pager(text)
            return
    click.echo(text)


def find_section(topic: str, commands: Iterable[str] = ()) -> Section:
    """The page or section that fits a topic best, a list of sections, or the index. Raises UsageError with a hint."""
    pages = _pages()
    index = next(sections(INDEX, pages.pop(INDEX)))
    wanted = _words(topic)
    if not wanted:
        return index
    all_sections = [section for page, text in pages.items() for section in sections(page, text)]

    def distance(section: Section) -> tuple[int, int]:
        words = _words(section.name)
        if set(wanted) <= set(words):
            is_end = wanted in (words[: len(wanted)], words[-len(wanted) :])
            return (0 if words == wanted else 1 if is_end else 2), section.level
        return 3, 0

    best = min(all_sections, key=distance)
    rows = answers(topic, pages["faq"])
    if distance(best) < ((1, 0) if rows else (3, 0)):
        return best
    if lines := [*_of_message(topic, rows)] or [*_found_in(topic, all_sections)] or [*_meant(topic)]:
        return Section(topic, 1, lines)
    hint = resembling(topic, [*pages, *commands, *(section.name for section in all_sections)])
    raise UsageError(f'no page, section or command is named "{topic}"' + (hint or f" (pages: {', '.join(pages)})"))


def _of_message(topic: str, rows: Sequence[str]) -> Iterator[str]:
    """The help on a message: ``rows`` of the tables in page ``faq``, or the page about the module that prints it."""
    if rows:
        yield from (f"# {topic}", "", "| message | what to do |", "|---|---|", *rows, "")
    elif message := printed(topic):
        yield from (
            f"# {topic}",
            "",
            f"`{message.text.strip(' .:;,')}`",
            "",
            f"is explained by `batchgen help {message.page}`.",
            "",
        )


def _found_in(topic: str, all_sections: Iterable[Section]) -> Iterator[str]:
    """The sections with the words of a topic; those for developers come last."""
    listed: list[list[str]] = [[], []]
    page = ""
    for section in all_sections:
        page = section.name if section.level == 1 else page
        if section.level == 2 and _stands_in(topic, section):
            listed[page in _LAST_PAGES].append(f"* `batchgen help {shlex.quote(section.name)}`")
    if any(listed):
        title = f"# {' and '.join(topic.split())} {'are' if ' ' in topic else 'is'} found in"
        yield from (title, "", *listed[0], *listed[1])


def _meant(topic: str) -> Iterator[str]:
    """Links to the pages for words of a topic that other tools use."""
    topics = dict.fromkeys(synonym.topic for word in topic.split() if (synonym := synonym_of(word)))
    if topics:
        yield from (f"# {topic}: pages on its words", "")
        yield from (f"* `batchgen help {shlex.quote(name)}`" for name in topics)


def _stands_in(topic: str, section: Section) -> bool:
    """Whether a section has each word of the topic; the parts of a word such as max_tokens must be adjacent."""
    text = f" {' '.join(_words(' '.join(section.lines)))} "
    return all(f" {' '.join(_words(word))} " in text for word in topic.split())


def is_heading(topic: str) -> bool:
    """Whether a page or heading has this name."""
    wanted = _words(topic)
    named = (_words(section.name) for page, text in _pages().items() for section in sections(page, text))
    return not wanted or wanted in named


def _pages() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}


def sections(page: str, text: str) -> Iterator[Section]:
    """All sections of a page; the first is the page itself."""
    lines = text.splitlines()
    heads: list[tuple[int, int]] = []  # line, level
    is_code = False
    for number, line in enumerate(lines):
        is_code ^= line.startswith(_FENCE)
        if not is_code and (match := _HEADING.fullmatch(line)):
            heads.append((number, len(match[1])))
    for index, (start, level) in enumerate(heads):
        end = next((number for number, other in heads[index + 1 :] if other <= level), len(lines))
        yield Section(_plain(lines[start].lstrip("# ")) if level > 1 else page, level, lines[start:end])


def _words(text: str) -> list[str]:
    """The words of a name: "max_tokens", "--max-tokens" and "Max tokens" are the same, "code" and "codes" too."""
    return [word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", text.lower())]


def render(section: Section, width: int) -> str:
    """A section as text of ``width`` columns: headings in bold, paragraphs filled, tables aligned, code as it is."""
    lines: list[str] = []
    indent = "  "
    for block in _BLOCK.findall("\n".join(line for line in section.lines if not line.startswith("<!--"))):
        if heading := _HEADING.fullmatch(block):
            indent = "  " * max(len(heading[1]) - section.level + (section.level > 1), 1)
            lines.append(indent[2:] + click.style(_plain(heading[2]), bold=True))
        else:
            lines += [(indent + line).rstrip() for line in _lines(block, width - len(indent))]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip("\n"))


def _lines(block: str, width: int) -> list[str]:
    if block.startswith(_FENCE):
        _, *code, _ = block.split("\n")
        return textwrap.indent("\n".join(code), " " * max(0, min(2, width - max(map(len, code))))).split("\n")
    if block.startswith("|"):
        return _table(block.split("\n"), width)
    match = _ITEM.match(block)
    mark = match[0] if match else ""
    lines = _wrapped(" ".join(block.removeprefix(mark).split()), width - len(mark))
    return [mark + lines[0], *(" " * len(mark) + line for line in lines[1:])]


def _table(lines: Sequence[str], width: int) -> list[str]:
    """Columns two blanks apart; if that is too wide, the widest are narrowed and their cells wrapped."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if not line.startswith("|---")]
    widths = [max(len(_plain(cell)) for cell in column) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    table = []
    for row in rows:
        cells = [_wrapped(cell, size) for cell, size in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            table.append("  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)))
    return [table[0], "  ".join("-" * size for size in widths), *table[1:]]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(_plain(text), max(width, 10), break_on_hyphens=False) or [""]


def _plain(text: str) -> str:
    """Text without Markdown's marks: a link to a page becomes its words, other links are followed by their URL."""
    text = _LINK.sub(lambda link: f"{link[1]} ({link[2]})" if "://" in link[2] else link[1], text)
    return text.replace("**", "").replace("\\|", "|").strip()


class Message(NamedTuple):
    """A message with "…" in place of its variable parts, and the page that explains it."""

    text: str
    page: str


def answers(topic: str, faq: str) -> list[str]:
    """The rows of the tables in the page ``faq`` whose message contains ``topic`` or is contained in it."""
    wanted = _folded(topic)
    rows = ((match, line) for line in faq.splitlines() if (match := _ROW.match(line)))
    is_long = wanted.count(" ") + 1 >= _MIN_WORDS
    return [line for match, line in rows if (said := _folded(match[1])) in wanted or (is_long and wanted in said)]


def printed(topic: str) -> Message | None:
    """The message of the program that contains ``topic``; if there are several, the one with the most in common."""
    wanted = _folded(topic)
    if wanted.count(" ") + 1 < _MIN_WORDS:
        return None
    best, best_size = None, 0
    for name, text in literals():
        parts = [part for part in map(_folded, text.split("…")) if part]
        common = [part for part in parts if f" {part} " in f" {wanted} "]
        size = sum(map(len, common))
        if wanted in _folded(text):
            size = len(wanted) + 1
        elif 2 * size < sum(map(len, parts)) or not any(" " in part for part in common):
            continue
        if size > best_size:
            best, best_size = Message(text, PAGES[max(filter(name.startswith, PAGES), key=len)]), size
    return best


@cache
def literals() -> list[tuple[str, str]]:
    """Module and text of each string of the package that may be a message, "…" in place of filled-in values."""
    strings = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        texts = (text_of(node) for node in nodes if id(node) not in skipped)
        strings += [(module, text) for text in texts if " " in text.strip(" …")]
    return strings


def text_of(node: ast.AST) -> str:
    """A string literal, with "…" in place of filled-in values; "" for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "…" for part in parts)
    return ""


@cache
def _folded(text: str) -> str:
    """The words of a text in lower case, separated by one blank, without punctuation."""
    return " ".join(re.findall(r"[\w-]+", text.lower()))
