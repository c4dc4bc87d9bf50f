"""The plan of the house: rooms and their floors, what may import what, and how much a reader must take in.

Each rule is a function from a tree of files to a list of faults. It is asked of the package, where it must find none,
and of small trees with one planted fault, which it must find.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import batchgen
from batchgen.cli.main import cli
from batchgen.config.job import KEYS

PACKAGE = Path(__file__).parents[1] / "batchgen"

# A room imports rooms of lower floors only. Rooms of one floor do not import each other.
FLOORS = [
    {"core"},
    {"kernels"},
    {"config", "text", "model"},
    {"engine", "input", "output", "report"},
    {"run", "bench"},
    {"plan", "check", "workers"},
    {"cli"},
]
# The longest chain of imports inside each room: a reader follows no more files than that. Lower it where you can.
LONGEST_CHAINS = {
    "core": 4,  # errors mask the addresses in their messages
    "kernels": 9,
    "config": 4,  # from what a file holds to what a key is
    "text": 6,  # a tokenizer checks what its template shows of a chat
    "model": 8,
    "engine": 10,  # the self-test of kernels runs an engine
    "input": 7,  # down to the bytes of a file, remote ones included
    "output": 3,
    "report": 3,  # a report has tables, which have facts
    "run": 6,
    "bench": 2,
    "plan": 3,
    "check": 1,
    "workers": 5,
    "cli": 3,
}
TORCH_ROOMS = {"kernels", "model", "engine", "bench", "check"}
# Public names, which may import any room.
FACES = {"", "__main__", "api", "llm", "lm_eval"}
# The core, read in this order in an hour.
READING_PATH = [
    *("core.records", "engine.sequence", "engine.block_pool", "engine.scheduler", "engine.schedule"),
    *("engine.model_input", "engine.model_runner", "engine.engine", "model.decoder", "model.layers"),
]
MAX_PATH_LINES = 1745
MAX_ARROWS = {"engine": 49}  # imports between files of a room
MAX_FILES = {"workers": 14}
MAX_FILE_LINES = 350
MAX_PREFIX_FAMILY = 2
VAGUE_NAMES = {"found", "known", "given", "there", "asked", "told"}
RELATIVE_WORDS = {"What", "That", "Whether", "Of", "So", "Where", "How", "If", "Why", "Which"}
# What a user has to know of: the closed list. A name enters when one leaves.
CONCEPTS = {
    "commands": "bench cat check env help merge plan report run status try",
    "switches of run": """
        allow-mixed-kernels deadline heartbeat-s help-all json-progress max-error-rate max-runtime
        max-total-tokens overwrite quiet shard update
    """,
    "input formats": "auto csv hf jsonl openai-batch parquet text",
    "output formats": "auto csv jsonl openai-batch parquet",
    "extras": "gs lm-eval ray report s3 test",
    "public names": """
        BatchgenError Engine EngineConfig GateFailed InputError JobSpec LLM LockedError ModelError OutOfMemory
        RemoteError Request Result ResumeMismatch Run RunStopped SamplingParams StorageError Tokenizer UsageError
        __version__ generate load_job load_model plan_job read_report run_job
    """,
    "[model]": "adapter device dtype path quantization revision tokenizer",
    "[input]": """
        chat_template chat_template_kwargs columns continue_final_message delimiter encoding format id limit messages
        path prompt prompt_token_ids regenerate special_tokens system
    """,
    "[sampling]": """
        allowed_token_ids bad_words frequency_penalty generation_config ignore_eos logit_bias logprobs max_repeats
        max_tokens min_p min_tokens n presence_penalty prompt_logprobs repetition_penalty seed stop
        stop_token_ids structured_outputs temperature thinking_token_budget top_k top_p
    """,
    "[classify]": "by labels",
    "[embed]": "dimensions dtype normalize pooling prompt truncate",
    "[eval]": "expected extract",
    "[engine]": """
        block_size kv_cache_dtype kv_cache_memory max_model_len max_num_batched_tokens max_num_seqs threads
    """,
    "[output]": """
        format logprobs_dtype parse path publish reuse token_ids
    """,
    "[cluster]": "cpus_per_worker gpus_per_worker load_timeout ray resources step_timeout workers",
}


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
    for node in facts_of(tree.texts[name])[0]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            inside = node.module.removeprefix("batchgen").removeprefix(".")
            modules = [f"{inside}.{alias.name}".removeprefix(".") for alias in node.names]
            yield from (f"batchgen.{module}" if module in tree.texts else node.module for module in modules)


def own_imports(tree: Tree, name: str) -> set[str]:
    """The package's modules that one imports."""
    own = {module for module in imports(tree, name) if module.split(".")[0] == "batchgen"}
    return {module.removeprefix("batchgen").removeprefix(".") for module in own} - {name}


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
        own_floor = floor(room(name))
        for other in own_imports(tree, name):
            other_floor = floor(room(other))
            if room(other) != room(name) and (own_floor is None or other_floor is None or other_floor >= own_floor):
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
    return [" -> ".join(modules) for name, modules in longest.items() if len(modules) > LONGEST_CHAINS.get(name, 3)]


def large_files(tree: Tree) -> list[str]:
    """Files that are too long to be read in one go."""
    lengths = {name: _lines(text) for name, text in tree.texts.items()}
    return [f"{name}: {length} lines" for name, length in lengths.items() if length > MAX_FILE_LINES]


def too_long_a_path(tree: Tree) -> list[str]:
    """The reading path, where it takes more than its hour."""
    lines = sum(_lines(tree.texts.get(name, "")) for name in READING_PATH)
    return [f"{lines:,} lines, at most {MAX_PATH_LINES:,}"] if lines > MAX_PATH_LINES else []


def _lines(text: str) -> int:
    return text.count("\n")


def crowded_rooms(tree: Tree) -> list[str]:
    """Rooms of more files, or of more imports between them, than one person keeps in mind."""
    files = Counter(map(room, tree.texts))
    arrows = Counter(
        room(name) for name in tree.texts for other in own_imports(tree, name) if room(other) == room(name)
    )
    faults = [f"{name}: {files[name]} files" for name, most in MAX_FILES.items() if files[name] > most]
    return faults + [f"{name}: {arrows[name]} arrows" for name, most in MAX_ARROWS.items() if arrows[name] > most]


def docstrings_without_a_noun(tree: Tree) -> list[str]:
    """Docstrings that begin with a relative clause; of a function that returns a bool, "Whether" is what it tells."""
    return [f"{name}: {fault}" for name, text in tree.texts.items() for fault in facts_of(text)[1]]


def vague_names(tree: Tree) -> list[str]:
    """Variables and parameters by names that say where a value came from, not what it is."""
    return [f"{name}: {variable}" for name, text in tree.texts.items() for variable in facts_of(text)[2]]


@cache
def facts_of(text: str) -> tuple[list[ast.Import | ast.ImportFrom], list[str], list[str]]:
    """In one walk the imports, what has a docstring without a noun, and the vague names."""
    imports, nameless, vague = [], [], []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = (ast.get_docstring(node) or "").partition(" ")[0]
            returns = ast.unparse(node.returns) if isinstance(node, ast.FunctionDef) and node.returns else ""
            if first in RELATIVE_WORDS and not (first == "Whether" and returns.startswith(("bool", "TypeGuard"))):
                nameless.append(getattr(node, "name", "the module"))
        variable = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
        if variable in VAGUE_NAMES:
            vague.append(variable)
    return imports, nameless, vague


RULES: list[Callable[[Tree], list[str]]] = [
    outside_rooms,
    upward_imports,
    circles,
    prefix_families,
    heavy_imports,
    long_chains,
    large_files,
    too_long_a_path,
    crowded_rooms,
    docstrings_without_a_noun,
    vague_names,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Tree], list[str]]) -> None:
    assert rule(package()) == []


def test_the_list_of_concepts_is_closed() -> None:
    """Whoever adds a name takes one away, or says in the commit why a user has to know one more."""
    run = {option.name for option in cli.commands["run"].params if option.name and getattr(option, "help", "job")}
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    concepts = {
        "commands": set(cli.commands),
        "switches of run": {name.replace("_", "-") for name in run if "__" not in name} - {"job"},
        "input formats": set(KEYS["input"]["format"].kind.choices),
        "output formats": set(KEYS["output"]["format"].kind.choices),
        "extras": set(project["optional-dependencies"]),
        "public names": set(batchgen.__all__),
        **{f"[{section}]": set(keys) for section, keys in KEYS.items()},
    }
    assert concepts == {kind: set(names.split()) for kind, names in CONCEPTS.items()}


def test_no_two_files_of_tests_have_one_name_and_none_imports_another() -> None:
    """pytest imports them as modules without a package: the second of a name would end the whole suite."""
    files = [*(PACKAGE.parent / "tests").rglob("test_*.py")]
    names = Counter(path.name for path in files)
    assert [name for name, count in names.items() if count > 1] == []
    assert [path for path in files if re.search(r"^(from|import) test_", path.read_text(), re.MULTILINE)] == []


def test_the_map_of_the_tests_names_files_that_are_there() -> None:
    tests = PACKAGE.parent / "tests"
    text = (tests / "conftest.py").read_text(encoding="utf-8")
    promise = ast.literal_eval(text.partition("PROMISE = ")[2].partition("\n}\n")[0] + "}")
    named = [
        tests / ("" if room == "tests" else room) / f"test_{name}.py"
        for room, names in promise.items()
        for name in names.split()
        if name != "*"
    ]
    assert len(named) > 40
    assert [path for path in named if not path.exists()] == []


SOUND = Tree(
    {
        "core.errors": "",
        "model.decoder": "import torch\nfrom batchgen.core import errors\n",
        "run.job": "from batchgen.model.decoder import Decoder\n",
    }
)
CHAIN = [(f"output.f{number}", f"from batchgen.output.f{number + 1} import x") for number in range(8)]
# What is added to a sound house, module by module, so that each rule finds a fault.
FAULTS: list[tuple[Callable[[Tree], list[str]], list[tuple[str, str]]]] = [
    (outside_rooms, [("helpers", "x = 1")]),
    (upward_imports, [("model.decoder", "if TYPE_CHECKING:\n    from batchgen.run import job")]),
    (upward_imports, [("model.decoder", "def late():\n    import batchgen.run.job")]),
    (upward_imports, [("config.job", "from batchgen.model.decoder import Decoder")]),  # of the same floor
    (circles, [("core.units", "import batchgen.core.errors"), ("core.errors", "from batchgen.core import units")]),
    (prefix_families, [(f"report.plot_{name}", "") for name in ("time", "rows", "tokens")]),
    (prefix_families, [(name, "") for name in ("report.plot", "report.plot_time", "report.plot_rows")]),
    (heavy_imports, [("run.job", "def late():\n    import torch.nn")]),
    (heavy_imports, [("model.decoder", "from numba import njit")]),
    (long_chains, [*CHAIN, ("output.f8", "")]),
    (large_files, [("run.job", "x = 1\n" * 400)]),
    (too_long_a_path, [("core.records", "\n" * MAX_PATH_LINES)]),
    (crowded_rooms, [(f"workers.f{number}", "") for number in range(MAX_FILES["workers"] + 1)]),
    (docstrings_without_a_noun, [("engine.sizes", 'def size() -> int:\n    """What a step holds."""')]),
    (docstrings_without_a_noun, [("engine.sizes", '"""Whether it fits."""')]),
    (vague_names, [("core.units", "found = 1")]),
    (vague_names, [("core.units", "def add(known: int) -> None: ...")]),
]


@pytest.mark.parametrize(("rule", "lines"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_found(rule: Callable[[Tree], list[str]], lines: list[tuple[str, str]]) -> None:
    assert rule(SOUND) == []
    planted = SOUND
    for name, line in lines:
        planted = planted.with_line(name, line)
    assert rule(planted)


def test_the_plan_names_each_room_once_and_no_other() -> None:
    named = [name for rooms in FLOORS for name in rooms]
    assert len(named) == len(set(named))
    assert {room(name) for name in package().texts.keys() - FACES} == set(named)


def test_the_internals_page_shows_these_floors_and_this_reading_path() -> None:
    """Line counts may be a few lines off: not every change of a file should have to change the page."""
    page = (PACKAGE / "docs" / "internals.md").read_text(encoding="utf-8")
    floors = re.findall(r"^\| \d \| ([\w, ]+) \|", page, re.MULTILINE)
    assert [set(names.split(", ")) for names in reversed(floors)] == FLOORS
    path = re.findall(r"^\| `([\w/]+)` \|.*\| (\d+) \|$", page, re.MULTILINE)
    assert [name.replace("/", ".") for name, _ in path] == READING_PATH
    lines = {name: _lines(package().texts[name.replace("/", ".")]) for name, _ in path}
    assert [(name, lines[name]) for name, said in path if abs(lines[name] - int(said)) > 25] == []


def test_the_internals_page_names_files_and_functions_of_a_row_that_are_there() -> None:
    page = (PACKAGE / "docs" / "internals.md").read_text(encoding="utf-8")
    hops = re.findall(r"^\| `([\w/]+)` \| `(?:\w+\.)?(\w+)` \|", page, re.MULTILINE)
    assert len(hops) > 10
    assert [hop for hop in hops if f"def {hop[1]}(" not in package().texts[hop[0].replace("/", ".")]] == []


# Imported where it is there: the compiler of GPUs, which torch's CUDA builds bring.
NOT_DECLARED = {"triton"}


def test_each_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name != "test"]
    declared = {re.split(r"[^\w-]", line)[0] for line in chain(project["dependencies"], *extras)}
    imported = {module.partition(".")[0] for name in package().texts for module in imports(package(), name)}
    available = {name.replace("-", "_") for name in declared} | sys.stdlib_module_names | {"batchgen"}
    assert imported - available - NOT_DECLARED == set()
