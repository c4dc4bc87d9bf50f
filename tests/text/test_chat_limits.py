"""Chat templates of strangers end in bounded time and memory, whatever they do, and cost only their own row."""

from __future__ import annotations

import array
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from input_helpers import write_tokenizer
from repeats import slow
from run_helpers import ENVIRONMENT, MODEL, JobMaker, finish, rows_of, start, until_phase

from batchgen.core import limited
from batchgen.core.errors import BatchgenError, ModelError
from batchgen.text import chat
from batchgen.text.chat import ChatTemplate, ChatTemplateError
from batchgen.text.tokenizer import Tokenizer

Answer = str | ChatTemplateError

DOUBLING = "{% set ns = namespace(s='aa') %}{% for i in range(40) %}{% set ns.s = ns.s OP ns.s %}{% endfor %}{{ ns.s }}"
HANGS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FILLS = DOUBLING.replace("OP", "~")
HOSTILE = [
    HANGS,
    FILLS,
    DOUBLING.replace("OP", "+"),
    DOUBLING.replace("namespace(s='aa')", "namespace(s=[0, 0])").replace("OP", "+"),
    "{% set ns = namespace(n=2) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% for i in range(99999) %}{% set a = range(99999)|list %}{% endfor %}",
    "{% set a = range(99999)|list %}{% for i in a %}{% set b = a|sort %}{% endfor %}",
    "{% for i in range(9999) %}{% set b = range(99999)|map('string')|sort(reverse=true)|join %}{% endfor %}",
    *("{{ (messages|length + 7)|round(-10**9) }}", "{{ 1|round(-10**9) }}", "{{ 1.5|round(10**9) }}"),
    *("{{ ('www.a.bc/ ' * 10**6)|urlize }}", "{{ ('<a ' * 10**6)|striptags }}"),
    *("{{ ('a ' * 4 * 10**6)|wordwrap(1) }}", "{{ ('ab' * 10**6)|wordwrap(1, wrapstring='x' * 1000) }}"),
    "{{ range(99999)|map('string')|map('center', 10**6)|join }}",
    "{{ ''.join(range(99999)|map('string')|map('center', 10**6)) }}",
    "{{ ('a' * 10**7)|list|unique|list|length }}{{ ('ab' * 10**7)|list|groupby(0)|length }}",
    *("{{ range(99999)|list|tojson(indent=10**4) }}", "{{ [range(99999)|list] * 10**4 | tojson }}"),
    *("{{ 9**9**9 }}{{ 9**(9**9) }}", "{{ (10**10**6)|string }}", "{{ (10**7 * '9')|int }}", "{{ 'a' * 10**12 }}"),
    *("{{ 10**12 * [0] }}", "{{ '%1000000000d' % 1 }}", "{{ '%.*f' % (10**9, 1) }}"),
    *("{{ '%(a)1000000000d' % {'a': 1} }}", "{{ '%1000000000d'|format(1) }}"),
    *("{{ ('%s' * 10000) % (('a' * 10**6),) * 3 }}", "{{ '{:1000000000}'.format(1) }}"),
    *("{{ '{:{w}}'.format(1, w=10**9) }}", "{{ '{a:1000000000}'.format_map({'a': 1}) }}", "{{ 'a'.ljust(10**9) }}"),
    *("{{ 'a'.zfill(10**9) }}", "{{ '\t'.expandtabs(10**9) }}", "{{ (1).to_bytes(10**9, 'big') }}"),
    *("{{ 'a'|center(10**9) }}", "{{ 'a\nb'|indent(10**9) }}", "{{ ['a']|batch(10**9, 'b')|list }}"),
    *("{{ range(9)|slice(10**9)|list }}", "{{ {'a': 1}|tojson(indent=10**9) }}"),
    *("{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}", "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}"),
    *("{{ ''.join(['a' * 10**6] * 10**4) }}", "{{ (['a' * 10**6] * 10**4)|join }}"),
    *("{% for i in range(100) %}{{ 'a' * 10**6 }}{% endfor %}", "{{ lipsum(n=10**6) }}"),
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x == ns.x|list }}{{ ns.x|tojson }}",
    "{% set c = cycler(*range(99999)) %}{% for i in range(99999) %}{{ c.next() }}{{ c.reset() }}{% endfor %}",
    "{{ '(' * 10**7 }}{{ ')' * 10**7 }}",
    "{% filter upper %}{% for i in range(10**4) %}{{ 'a' * 10**6 }}{% endfor %}{% endfilter %}",
    "{{ messages[0].content|safe|escape|forceescape|urlencode * 10**9 }}",
]


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a hostile template meets soon."""
    monkeypatch.setattr(chat, "MAX_CPU_S", 0.25)
    monkeypatch.setattr(chat, "MAX_BYTES", 128 << 20)
    monkeypatch.setattr(chat, "MAX_CHARS", 1 << 20)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def answers_of(source: str, *contents: Any) -> list[Answer]:
    return list(ChatTemplate(source, {}).render([user(content) for content in contents]))


def only_if(content: str, source: str) -> str:
    """A template that is hostile in chats with this content, and writes others down."""
    return f"{{% if messages[0].content == '{content}' %}}{source}{{% endif %}}{{{{ messages[0].content }}}}"


def folder_with(template: str, folder: Path) -> Path:
    """A copy of the sample model with another chat template."""
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("source", [slow(source) if at % 6 else source for at, source in enumerate(HOSTILE)])
def test_a_hostile_template_ends_in_a_prompt_or_in_one_line(source: str) -> None:
    try:
        [answer] = answers_of(source, "hi")
    except ChatTemplateError as error:  # while it was compiled, which computes constants
        answer = error
    assert len(str(answer)) <= chat.MAX_CHARS
    if isinstance(answer, ChatTemplateError):
        assert "\n" not in str(answer)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (HANGS, "it takes more than 0.25 s of processor time"),
        (FILLS, "it takes more than 128 MiB of memory"),
        ("{{ 'a' * (2**20 + messages|length) }}", "it makes a text of more than 1048576 characters"),
    ],
)
def test_the_message_says_which_limit_was_passed(source: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if source != HANGS:  # else a loaded machine may pass the limit of time on the way to the other
        monkeypatch.setattr(chat, "MAX_CPU_S", 60.0)
    [answer] = answers_of(source, "hi")
    assert str(answer) == f"the chat template failed: {reason}"


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("source", [slow(HANGS), FILLS, "{{ 1 / 0 }}", "{{ '%c' % 55357 }}"])
def test_a_hostile_chat_costs_no_neighbour(source: str) -> None:
    answers = answers_of(only_if("bad", source), "a", "bad", "b", "bad", "bad", "c")
    texts = [answer if isinstance(answer, str) else "error" for answer in answers]
    assert texts == ["a", "error", "b", "error", "error", "c"]


def test_the_processes_of_templates_stay_within_the_memory_limit() -> None:
    sources = json.dumps([FILLS, "{{ range(99999)|map('center', 10**6)|join }}"])
    code = (
        "import json, resource, sys\n"
        "from batchgen.text.chat import ChatTemplate\n"
        "for source in json.loads(sys.argv[1]):\n"
        "    print(*ChatTemplate(source, {}).render([[]]))\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    command = [sys.executable, "-c", code, sources]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    *answers, peak_kib = done.stdout.splitlines()
    assert all("512 MiB" in answer for answer in answers)
    assert int(peak_kib) << 10 < chat.MAX_BYTES + (64 << 20)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, slow(signal.SIGTERM), slow(signal.SIGHUP)])
def test_a_signal_to_the_process_costs_no_prompt(number: int) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    answers = template.render([user(n) for n in range(600)])
    rendered = [next(answers)]
    assert template._program._process is not None
    os.kill(template._program._process._popen.pid, number)
    assert rendered + list(answers) == [str(n) for n in range(600)]


def test_a_process_that_is_killed_again_and_again_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    render = limited._Process.answers

    def killed(self: limited._Process, chats: list[bytes]) -> Any:
        self._popen.kill()
        self._popen.wait()
        return render(self, chats)

    monkeypatch.setattr(limited._Process, "answers", killed)
    with pytest.raises(BatchgenError, match="killed repeatedly"):
        list(template.render([user("hi")]))


def kill_half_way(template: ChatTemplate) -> None:
    """Kill the process when it has written part of an answer that the pipe cannot hold."""
    assert template._program._process is not None
    popen = template._program._process._popen
    assert popen.stdout is not None
    deadline = time.monotonic() + 30
    while _num_unread(popen.stdout.fileno()) < 1 << 15:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    popen.kill()


def _num_unread(fd: int) -> int:
    num_bytes = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, num_bytes)
    return num_bytes[0]


@pytest.mark.parametrize("letter", [slow("a"), slow("é"), "🙂"])
def test_an_answer_cut_off_by_the_end_of_the_process_is_asked_for_again(letter: str) -> None:
    contents = ["hi", letter * 200_000, "last"]
    template = ChatTemplate("{{ messages[0].content }}", {})
    answers = template.render([user(content) for content in contents])
    rendered = [next(answers)]
    kill_half_way(template)
    assert rendered + list(answers) == contents


def test_processes_that_are_lost_between_good_answers_do_not_end_the_run() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    for _ in range(2 * limited._MAX_LOST):
        answers = template.render([user(n) for n in range(600)])
        rendered = [next(answers)]
        assert template._program._process is not None
        template._program._process._popen.kill()
        assert rendered + list(answers) == [str(n) for n in range(600)]


def test_a_template_that_compiles_no_more_is_one_line_that_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template._program._process is not None
    template._program._process._popen.kill()
    monkeypatch.setattr(limited._Process, "start", lambda self: ("", "it takes more than 5 s"))
    with pytest.raises(BatchgenError, match=r"does not start again: it takes .* \(it started .*; run again to resume"):
        list(template.render([user("hi")]))


def test_a_process_that_cannot_import_its_program_is_not_held_against_the_template(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('no\\nluck')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BatchgenError, match=r"cannot start the process that renders .*: ImportError: no luck$"):
        ChatTemplate("hi", {})


def test_a_process_that_ends_before_it_starts_is_not_held_against_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(BatchgenError, match=r"cannot start the process that renders chat templates: .* status 1"):
        ChatTemplate("hi", {})


def test_a_module_beside_the_package_does_not_replace_one_of_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "batchgen").symlink_to(Path(chat.__file__).parents[1])
    (tmp_path / "typing.py").write_text("raise ImportError('an obsolete backport')")
    code = (
        "import sys, typing\n"
        "sys.path.insert([name.endswith('-packages') for name in sys.path].index(True), sys.argv[1])\n"
        "from batchgen.text import chat\n"
        "assert chat.__file__.startswith(sys.argv[1])\n"
        "print(*chat.ChatTemplate('hi', {}).render([[]]))\n"
    )
    command = [sys.executable, "-I", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "hi\n", done.stderr


def test_the_limit_of_time_holds_where_its_signal_is_blocked() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    try:
        template = ChatTemplate("hi", {})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert template._program._process is not None
    status = Path(f"/proc/{template._program._process._popen.pid}/status").read_text()
    [blocked] = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")]
    assert int(blocked, 16) == 0


def test_ctrl_c_does_not_reach_the_process_even_while_it_starts() -> None:
    process = limited._Process(ChatTemplate("hi", {})._program._program)
    assert os.getpgid(process._popen.pid) != os.getpgrp()


def test_answers_taken_by_turns_are_those_of_their_own_chats() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    first, second = (template.render([user(f"{name}{n}") for n in range(300)]) for name in "ab")
    taken = [(a, b) for a, b in zip(first, second, strict=True)]
    assert taken == [(f"a{n}", f"b{n}") for n in range(300)]


def test_answers_that_are_not_taken_are_not_mixed_up_with_later_ones() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    answers = template.render([user(n) for n in range(9)])
    assert next(answers) == "0"
    answers.close()  # type: ignore[attr-defined]
    assert list(template.render([user("hi")])) == ["hi"]


def test_the_process_ends_with_a_run_that_is_killed() -> None:
    code = (
        "from batchgen.text.chat import ChatTemplate\n"
        "template = ChatTemplate('{{ messages }}', {})\n"
        "print(template._program._process._popen.pid, flush=True)\n"
        "input()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 30
    while _is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("tight")
def test_the_date_is_one_for_the_whole_run() -> None:
    template = ChatTemplate(only_if("bad", HANGS) + "{{ strftime_now('%H:%M:%S.%f') }}", {})
    first, error, second = template.render([user(""), user("bad"), user("")])
    assert isinstance(error, ChatTemplateError) and first == second


def test_message_values_without_a_json_type_print_as_text() -> None:
    contents = [date(2024, 5, 1), float("nan"), "é\u2028", b"x", 10**30]
    assert answers_of("{{ messages[0].content }}", *contents) == [str(content) for content in contents]


def test_messages_with_lone_surrogates_fail_as_any_text_of_them_would() -> None:
    assert answers_of("{{ messages[0].content|length }}", "\ud800") == ["1"]
    [answer] = answers_of("{{ messages[0].content }}", "\ud800")
    assert isinstance(answer, ChatTemplateError)


def test_a_chat_beyond_any_context_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_MAX_CHAT_BYTES", 1000)
    long, short = answers_of("{{ messages[0].content|length }}", "a" * 1000, "a")
    assert "at most 1,000 are taken" in str(long) and short == "1"


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(
    "source",
    [
        "{{ messages }}" * 700_000,
        "{{ " + "(" * 10_000 + ")" * 10_000 + " }}",
        "{{ 1" + " + 1" * 50_000 + " }}",
        "{% if true %}" * 200 + "{% endif %}" * 200,
        "{{ 1|round(-10**9) }}",
        "{{ [" * 20_000,
        "{% block a %}{% endblock %}" * 2,
        "{{ '" + "\\" * 9 + " }}",
    ],
    ids=["10 MB", "parentheses", "sum", "blocks", "constant", "lists", "twice", "quote"],
)
def test_a_template_that_cannot_be_compiled_is_one_line_that_names_the_file(source: str, tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").write_text(source)
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template does not compile: ") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("tight")
def test_a_row_whose_template_hangs_is_an_error_row_and_the_others_are_done(job: JobMaker) -> None:
    template = only_if("What is 3 times 3?", HANGS)
    job.write(rows_of(6))
    outcome = job.run(job.spec(model={"path": str(folder_with(template, job.folder / "model"))}))
    assert outcome.exit_code == 3
    assert [row["index"] for row in job.outputs()] == [0, 1, 2, 4, 5]
    [error] = job.errors()
    assert (error["index"], error["code"]) == (3, "template_error") and "0.25 s of processor time" in error["message"]


@pytest.mark.parametrize(("num_short", "phase"), [(0, "reading the input"), slow(30, "generating")])
def test_a_stop_ends_a_run_whose_template_hangs(num_short: int, phase: str, job: JobMaker) -> None:
    folder = folder_with(only_if("hang", HANGS), job.folder / "model")
    job.write([{"id": i, "question": "short" if i < num_short else "hang"} for i in range(num_short + 300)])
    process = start(["run", job.toml(model={"path": str(folder)})], step_s=0.01)
    until_phase(process, job.output, phase)
    process.send_signal(signal.SIGTERM)
    code, said = finish(process, timeout=10)
    assert code == 75, said


def test_a_fork_leaves_the_process_of_its_parent_alone() -> None:
    """It would wait for the end of a process that is not its own, once its copy of the template is collected."""
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert list(template.render([user("a")])) == ["a"]
    pid = os.fork()
    if not pid:
        del template
        os._exit(0)
    deadline = time.monotonic() + 60
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert time.monotonic() < deadline
    assert list(template.render([user("b")])) == ["b"]
