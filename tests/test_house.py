"""The plan of the house: rooms and their floors, what may import what, and how large it all may become.

Each rule is a function from a tree of files to a list of faults. It is asked of the package, where it must find none,
and of small trees with one planted fault, which it must find.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "batchgen"

# A room imports rooms of lower floors only. Rooms of one floor do not import each other.
FLOORS = [
    {"core", "kernels"},
    {"config", "text", "model"},
    {"engine", "input", "output", "report"},
    {"run", "bench"},
    {"plan", "check", "executors"},
    {"cli"},
]
# The longest chain of imports inside each room: a reader follows no more files than that. Lower it where you can.
LONGEST_CHAINS = {
    "core": 3,
    "kernels": 9,
    "config": 3,
    "text": 4,
    "model": 8,
    "engine": 8,
    "input": 5,
    "output": 4,
    "report": 3,
    "run": 6,
    "bench": 2,
    "plan": 4,
    "check": 3,
    "executors": 5,
    "cli": 3,
}
TORCH_ROOMS = {"kernels", "model", "engine", "bench", "check"}
# Public names, and where one of them was in 0.1: they may import any room.
FACES = {"", "__main__", "arrow", "data.tokenizer", "ray"}
MAX_LINES = 35_100  # 18,000 was the aim for one family in one form; lower this with every room that gets smaller
MAX_FILE_LINES = 350
MAX_PREFIX_FAMILY = 2


@dataclass(frozen=True)
class Tree:
    """A package's modules by dotted name below it, each with its text."""

    texts: dict[str, str]

    @classmethod
    def of(cls, folder: Path) -> Tree:
        """The tree in a folder."""
        texts = {}
        for path in sorted(folder.rglob("*.py")):
            parts = list(path.relative_to(folder).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            texts[name] = path.read_text(encoding="utf-8")
        return cls(texts)

    def with_line(self, name: str, line: str) -> Tree:
        """The same with a line more at the end of one module, which may be new."""
        return Tree(self.texts | {name: f"{self.texts.get(name, '')}\n{line}\n"})


@cache
def package() -> Tree:
    return Tree.of(PACKAGE)


def imports(tree: Tree, name: str) -> Iterator[str]:
    """All modules that one imports, of the package (below it) or not; for types alone and inside functions too."""
    for node in ast.walk(ast.parse(tree.texts[name])):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = node.module.removeprefix("batchgen").removeprefix(".")
            modules = [f"{inside}.{alias.name}".removeprefix(".") for alias in node.names]
            found = [f"batchgen.{module}" if module in tree.texts else node.module for module in modules]
        else:
            found = []
        yield from found


def own_imports(tree: Tree, name: str) -> set[str]:
    """The package's modules that one imports."""
    found = {module for module in imports(tree, name) if module.split(".")[0] == "batchgen"}
    return {module.removeprefix("batchgen").removeprefix(".") for module in found} - {name}


def room(name: str) -> str:
    return name.partition(".")[0]


def floor(name: str) -> int | None:
    return next((number for number, rooms in enumerate(FLOORS) if name in rooms), None)


def outside_rooms(tree: Tree) -> list[str]:
    """Modules that lie in no room."""
    return [name for name in tree.texts if name not in FACES and floor(room(name)) is None]


def upward_imports(tree: Tree) -> list[str]:
    """Imports that do not go to a lower floor."""
    faults = []
    for name in tree.texts.keys() - FACES:
        here = floor(room(name))
        for other in own_imports(tree, name):
            there = floor(room(other))
            if room(other) != room(name) and (here is None or there is None or there >= here):
                faults.append(f"{name} imports {other}")
    return faults


def circles(tree: Tree) -> list[str]:
    """Modules that import each other, directly or not."""
    below: dict[str, set[str]] = {name: own_imports(tree, name) for name in tree.texts}
    return [name for name in below if name in _reached(below, name)]


def _reached(below: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = list(below[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += below.get(name, ())
    return reached


def prefix_families(tree: Tree) -> list[str]:
    """Prefixes that several files of one folder share: such a prefix is a folder."""
    prefixes = Counter(name.partition("_")[0] for name in tree.texts if "_" in name.rpartition(".")[2].strip("_"))
    heads = Counter({prefix: prefix in tree.texts for prefix in prefixes})
    return [f"{prefix}_*" for prefix in prefixes if prefixes[prefix] + heads[prefix] > MAX_PREFIX_FAMILY]


def heavy_imports(tree: Tree) -> list[str]:
    """Imports of torch, numba and triton where they do not belong."""
    faults = []
    for name in tree.texts.keys() - FACES:
        for module in imports(tree, name):
            library = module.partition(".")[0]
            if (library == "torch" and room(name) not in TORCH_ROOMS) or (
                library in ("numba", "llvmlite", "triton") and room(name) != "kernels"
            ):
                faults.append(f"{name} imports {module}")
    return faults


def long_chains(tree: Tree) -> list[str]:
    """Rooms in which a chain of imports is longer than it may be."""
    inside = {
        name: {other for other in own_imports(tree, name) if room(other) == room(name)}
        for name in tree.texts.keys() - FACES
    }
    longest: dict[str, list[str]] = {}

    def chain(name: str, above: tuple[str, ...] = ()) -> list[str]:
        below = [chain(other, (*above, name)) for other in inside[name] if other not in above]  # circles end as well
        return [name, *max(below, key=len, default=[])]

    for name in inside:
        longest[room(name)] = max(longest.get(room(name), []), chain(name), key=len)
    return [" -> ".join(found) for name, found in longest.items() if len(found) > LONGEST_CHAINS.get(name, 3)]


def large_files(tree: Tree) -> list[str]:
    """Files that are too long to be read in one go."""
    lengths = {name: text.count("\n") for name, text in tree.texts.items()}
    return [f"{name}: {length} lines" for name, length in lengths.items() if length > MAX_FILE_LINES]


def too_many_lines(tree: Tree) -> list[str]:
    """The whole, where it has outgrown its plan."""
    total = sum(text.count("\n") for text in tree.texts.values())
    return [f"{total:,} lines"] if total > MAX_LINES else []


RULES: list[Callable[[Tree], list[str]]] = [
    outside_rooms,
    upward_imports,
    circles,
    prefix_families,
    heavy_imports,
    long_chains,
    large_files,
    too_many_lines,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Tree], list[str]]) -> None:
    assert rule(package()) == []


def sound() -> Tree:
    """A small house without a fault."""
    return Tree(
        {
            "core.errors": "",
            "model.decoder": "import torch\nfrom batchgen.core import errors\n",
            "run.job": "from batchgen.model.decoder import Decoder\n",
        }
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_sound_house_has_no_fault(rule: Callable[[Tree], list[str]]) -> None:
    assert rule(sound()) == []


@pytest.mark.parametrize(
    ("rule", "name", "line"),
    [
        (outside_rooms, "helpers", "x = 1"),
        (upward_imports, "model.decoder", "from batchgen.run.job import run_job"),
        (upward_imports, "model.decoder", "if TYPE_CHECKING:\n    from batchgen.run import job"),
        (upward_imports, "model.decoder", "def late():\n    import batchgen.run.job"),
        (upward_imports, "config.job", "from batchgen.model.decoder import Decoder"),  # of the same floor
        (upward_imports, "kernels.select", "from batchgen.core.errors import ModelError"),
        (upward_imports, "core.errors", "from batchgen import run"),
        (heavy_imports, "run.job", "def late():\n    import torch.nn"),
        (heavy_imports, "model.decoder", "from numba import njit"),
        (large_files, "run.job", "x = 1\n" * 400),
        (too_many_lines, "run.job", "\n" * MAX_LINES),
    ],
)
def test_a_planted_fault_is_found(rule: Callable[[Tree], list[str]], name: str, line: str) -> None:
    assert rule(sound().with_line(name, line))


@pytest.mark.parametrize("line", ["from batchgen.core import units", "def late():\n    import batchgen.core.units"])
def test_a_planted_circle_is_found(line: str) -> None:
    planted = (
        sound().with_line("core.units", "from batchgen.core.errors import UsageError").with_line("core.errors", line)
    )
    assert sorted(circles(planted)) == ["core.errors", "core.units"]


def test_a_planted_prefix_family_is_found() -> None:
    planted = sound()
    for name in ("report.plot_time", "report.plot_rows"):
        planted = planted.with_line(name, "")
    assert prefix_families(planted) == []
    assert prefix_families(planted.with_line("report.plot_tokens", "")) == ["report.plot_*"]
    assert prefix_families(planted.with_line("report.plot", "")) == ["report.plot_*"]


def test_a_planted_chain_is_found() -> None:
    planted = sound()
    for number in range(8):
        planted = planted.with_line(f"output.f{number}", f"from batchgen.output.f{number + 1} import x")
    assert len(long_chains(planted.with_line("output.f8", ""))) == 1


def test_the_plan_names_each_room_once_and_no_other() -> None:
    named = [name for rooms in FLOORS for name in rooms]
    assert len(named) == len(set(named))
    assert {room(name) for name in package().texts.keys() - FACES} == set(named)
