"""Inputs that no one should write: rows, job files and paths, drawn by a seed.

``hostile_cases`` yields as many as asked for, of each kind in turn. A case says how many rows its input has, where that
is known and the job must run: its first row is then a sound one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from batchgen.config.job import KEYS
from batchgen.config.sampling import ROW_KEYS

SOUND = {
    "id": "sound",
    "question": "What is 2 + 2?",
    "answer": "4",
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt_token_ids": [1, 2, 3],
}
MANY = 1 << 16

_TEXTS = (
    *(
        *("", " ", "\n", "\t \u2003", "\0", "a\0b", "\x1b[31mred\x1b[0m", "\u202eevil", "\u2028\u2029", "\ufeffmark"),
        "\x85",
    ),
    *("naïve", "日本語" * 20, "👩‍👩‍👧‍👦" * 10, "e" + "\u0301" * 300, "<|im_start|>system\n<|im_end|>", "<|endoftext|>"),
    *("{question}", "{{", "%s%n", "'; DROP TABLE ids; --", "../../etc/passwd", "=cmd()", "NaN", "null", "a" * MANY),
)
_RAW = (
    *("null", "true", "false", "0", "-0", "-1", "1.5", "1e5", "1e999", "-1e999", "NaN", "-Infinity", "1E400"),
    *(
        *("9" * 30, "-" + "9" * 400, "9" * 5000, "0.1e-400", '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"'),
        '"\\uD83D\\uDE00"',
    ),
    *("[]", "{}", "[[]]", "[null]", '[{"role": "user"}]', "[1, 2.5]", "[-1]", "[99999999]", "[true]", '{"": ""}'),
    *("[" * 60 + "]" * 60, "[" * 10_000 + "]" * 10_000, '{"a":' * 5000 + "1" + "}" * 5000),
)  # JSON as it is written
_COLUMNS = (
    *("id", "question", "answer", "messages", "prompt_token_ids", "sampling", "text", "prompt", "index", "timings"),
    *(
        *("custom_id", "method", "url", "body", "n", "choices", "stop", "logprobs", "usage", "", "a.b", "é", "x\0y"),
        "input_id",
    ),
)
_BYTES = (
    *(b"\0", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf", b"\xe6\x9d", b"\r", b"\x1a"),
    b'"',
)


@dataclass(frozen=True)
class Case:
    """A command over files: ``job`` is the job file, ``arguments`` follow ``run job.toml``.

    ``num_rows`` is None where the job may as well be refused.
    """

    kind: str
    job: bytes
    files: dict[str, bytes] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    num_rows: int | None = None
    links: dict[str, str] = field(default_factory=dict)


def hostile_cases(count: int, seed: int) -> Iterator[Case]:
    """``count`` cases, of all kinds in turn; the same for the same seed."""
    kinds = [makes for makes, weight in _KINDS.items() for _ in range(weight)]
    for number, make in enumerate(islice(cycle(kinds), count)):
        yield make(random.Random(f"{seed}/{number}"))


def job_text(rng: random.Random, *, input_name: str = "in.jsonl", keys: str | None = None, extra: str = "") -> bytes:
    """A sound job, its keys that say where prompts are and what to keep drawn at random."""
    prompt = rng.choice(['prompt = "question"', 'prompt = "{question} {answer}"', 'messages = "messages"'])
    drawn = [prompt, rng.choice(['id = "id"', ""]), rng.choice(['columns = "*"', 'columns = ["answer"]', ""])]
    output = rng.choice(["jsonl", "jsonl", "parquet", "openai-batch"])
    return f"""
[model]
path = "{{model}}"
[input]
path = "{input_name}"
{chr(10).join(drawn) if keys is None else keys}
[sampling]
max_tokens = 4
{extra}
[output]
path = "out"
format = "{output}"
""".encode()


def _value(rng: random.Random, depth: int = 0) -> str:
    """A JSON value as written."""
    draw = rng.random()
    if draw < 0.4:
        return json.dumps(rng.choice(_TEXTS), ensure_ascii=rng.random() < 0.5)
    if draw < 0.75 or depth > 2:
        return rng.choice(_RAW)
    if draw < 0.87:
        return f"[{', '.join(_value(rng, depth + 1) for _ in range(rng.randrange(4)))}]"
    return _object({rng.choice(_COLUMNS): _value(rng, depth + 1) for _ in range(rng.randrange(4))})


def _object(values: dict[str, str]) -> str:
    return f"{{{', '.join(f'{json.dumps(name)}: {value}' for name, value in values.items())}}}"


def _row(rng: random.Random) -> bytes:
    values = {name: json.dumps(value) for name, value in SOUND.items()}
    values["id"] = json.dumps(f"r{rng.randrange(40)}")
    for _ in range(rng.randrange(1, 3)):
        values[rng.choice(_COLUMNS)] = _value(rng)
    text = _object(values)
    if rng.random() < 0.1:  # a key twice
        text = f'{text[:-1]}, "question": {_value(rng)}}}'
    line = text.encode(errors="surrogatepass")
    if rng.random() < 0.25:
        at = rng.randrange(len(line))
        line = rng.choice([line[:at], line[at:], line[:at] + rng.choice(_BYTES) + line[at:], line * 2, line[::-1]])
    return line.replace(b"\n", b" ")


def _num_lines(content: bytes) -> int:
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return sum(1 for line in lines if line and not line.isspace())


def _lines(rng: random.Random, lines: list[bytes]) -> bytes:
    """Lines as a file, with line ends of all kinds, blank lines, a mark at the start or no end."""
    end = rng.choice([b"\n", b"\n", b"\r\n"])
    content = b"".join(line + end + rng.choice([b"", b"", b"", b"\n", b"  \r\n"]) for line in lines)
    if rng.random() < 0.2:
        content = content.rstrip()
    return rng.choice([b"", b"", b"\xef\xbb\xbf"]) + content


def _sound_row(**columns: Any) -> bytes:
    return json.dumps(SOUND | columns).encode()


def rows_case(rng: random.Random) -> Case:
    """JSON Lines whose columns hold anything."""
    content = _lines(rng, [_sound_row(), *(_row(rng) for _ in range(30))])
    return Case("rows", job_text(rng), {"in.jsonl": content}, num_rows=_num_lines(content))


def chats_case(rng: random.Random) -> Case:
    """Chats of odd messages."""
    lines = [_sound_row()]
    for _ in range(30):
        messages = [
            _object(
                {
                    "role": rng.choice(['"user"', '"system"', '"assistant"', '"tool"', _value(rng)]),
                    "content": rng.choice(['"hi"', '[{"type": "text", "text": "hi"}]', _value(rng)]),
                    rng.choice(["name", "tool_calls", "x"]): _value(rng),
                }
            )
            for _ in range(rng.randrange(4))
        ]
        row = {"id": _value(rng), "messages": f"[{', '.join(messages)}]", "answer": _value(rng)}
        lines.append(_object(row).encode(errors="surrogatepass").replace(b"\n", b" "))
    content = _lines(rng, lines)
    job = job_text(rng, keys='messages = "messages"\nsystem = "Be terse."')
    return Case("chats", job, {"in.jsonl": content}, num_rows=_num_lines(content))


def sampling_case(rng: random.Random) -> Case:
    """Sampling values of any type and size, by row."""
    lines = [_sound_row()]
    for number in range(30):
        given = {rng.choice((*ROW_KEYS, "temprature", "")): _value(rng) for _ in range(rng.randrange(1, 4))}
        row = {"id": str(number), "question": '"Why?"', "sampling": rng.choice([_object(given), _value(rng)])}
        lines.append(_object(row).encode(errors="surrogatepass").replace(b"\n", b" "))
    content = _lines(rng, lines)
    job = job_text(rng, keys='prompt = "question"\nid = "id"')
    return Case("sampling", job, {"in.jsonl": content}, num_rows=_num_lines(content))


def batch_case(rng: random.Random) -> Case:
    """Lines for OpenAI's Batch API with odd bodies."""
    chat, completion = "/v1/chat/completions", "/v1/completions"
    sound = {"custom_id": "sound", "method": "POST", "url": completion, "body": {"prompt": "Once"}}
    lines = [json.dumps(sound).encode()]
    names = (
        *ROW_KEYS,
        "tools",
        "response_format",
        "stream",
        "best_of",
        "top_logprobs",
        "max_completion_tokens",
        "model",
    )
    for number in range(25):
        body = {
            "messages": rng.choice(['[{"role": "user", "content": "hi"}]', _value(rng)]),
            "prompt": rng.choice(['"Once"', "[1, 2]", _value(rng)]),
            **{rng.choice(names): _value(rng) for _ in range(rng.randrange(3))},
        }
        line = {
            "custom_id": f'"{number}"',
            "method": '"POST"',
            "url": json.dumps(rng.choice([chat, completion, "/v2"])),
        }
        line["body"] = _object(body)
        if rng.random() < 0.4:
            line[rng.choice(list(line))] = _value(rng)
        lines.append(_object(line).encode(errors="surrogatepass").replace(b"\n", b" "))
    content = _lines(rng, lines)
    job = job_text(rng, keys='format = "openai-batch"')
    return Case("openai-batch", job, {"in.jsonl": content}, num_rows=_num_lines(content))


_TOML_VALUES = (
    *(
        *('""', '"auto"', "0", "-1", "1", "1.5", "true", "false", "[]", "{}", "[[]]", "[{}]", '[""]', "nan", "inf"),
        "1e400",
    ),
    *("1979-05-27T07:32:00Z", "07:32:00", "0xdeadbeef", "9" * 18, "9" * 25, "9" * 5000, '"\\u0000"', '"\\u001b[31m"'),
    *(
        *('"' + "a" * 5000 + '"', "[" * 50 + "]" * 50, "[" * 3000 + "]" * 3000, "{ a = { b = 1 } }", '"${NOT_SET}"'),
        '"${HOME}"',
    ),
    *('"-"', '"hf:"', '"hf:no/such?x=y"', '"/"', '"."', '"~nobody/x"', '"*"', '"**"', '"["', '"/dev/null"', '"dummy:"'),
    *('"{"', '"}"', '"{a.b}"', '"{question!r}"', '"{0}"', '"{question:>999999999}"', '"\\ud7ff"', "'''\na\n'''"),
)


def job_case(rng: random.Random) -> Case:
    """A job file with wrong values, sections or bytes."""
    text = job_text(rng).decode()
    draw = rng.random()
    if draw < 0.55:  # a key set to anything
        section = rng.choice([*KEYS])
        key, value = rng.choice([*KEYS[section], "nope", '"é"', '""', "a.b"]), rng.choice(_TOML_VALUES)
        value = '"."' if (section, key, value) == ("output", "path", '"/"') else value
        lines = [line for line in text.splitlines() if not line.startswith(f"{key} =")]
        sections = f"[{section}]" in lines
        at = lines.index(f"[{section}]") + 1 if sections else len(lines)
        lines[at:at] = [f"{key} = {value}"] if sections else [f"[{section}]", f"{key} = {value}"]
        job = "\n".join(lines).encode(errors="surrogatepass")
    elif draw < 0.75:
        name = rng.choice(["model", "input", "sampling", "engine", "output", "modle", "é", "cluster"])
        forms = [
            f"{name} = {rng.choice(_TOML_VALUES)}\n{text}",
            f"{text}\n[[{name}]]\na = 1",
            f"{text}\n[{name}.x.y]\nz = 1",
        ]
        forms += [f"{name}.path = 1\n{text}", f"{text}\n['{name}']\n", f"{text}\n[{'.'.join(['a'] * 3000)}]\n"]
        job = rng.choice(forms).encode(errors="surrogatepass")
    else:
        raw = text.encode()
        at = rng.randrange(len(raw))
        piece = rng.choice([*_BYTES, b"=", b"[", b"]", b"#", b"\n", b"'''", rng.randbytes(8)])
        broken = [
            raw[:at],
            raw[:at] + piece + raw[at:],
            raw[at:],
            b"",
            b"\xef\xbb\xbf" + raw,
            raw.replace(b"\n", b"\r"),
        ]
        job = rng.choice([form.decode("latin1") for form in broken]).encode("latin1")
    return Case("job files", job, {"in.jsonl": _sound_row() + b"\n"})


def path_case(rng: random.Random) -> Case:
    """Inputs that are no files, and files with odd names."""
    name = rng.choice(
        ["\x1b[31mred", "new\nline", "\u202etxt", "a" * 240, "-", "[x]", "sp ace", "é", "\udcff", "x\\y", "*"]
    )
    if rng.random() < 0.4:
        job = job_text(rng, keys='prompt = "question"', input_name="unused")
        return Case(
            "paths", job, {name: _sound_row() + b"\n"}, ("--input", f"./{name}"), 1 if name not in "*[x]" else None
        )
    links = {
        "loop": "loop",
        "dangling": "nothing",
        "zero": "/dev/zero",
        "full": "/dev/full",
        "fifo": "FIFO",
        "folder": ".",
    }
    target = rng.choice([*links, "/proc/self/mem", "/sys", "", "a" * 5000, "in.jsonl/x", "**/*", "out/x"])
    job = job_text(rng, keys='prompt = "question"')
    return Case("paths", job, {"in.jsonl": b""}, ("--input", target), links=links)


_KINDS: dict[Callable[[random.Random], Case], int] = {
    rows_case: 3,
    chats_case: 1,
    sampling_case: 2,
    batch_case: 2,
    job_case: 5,
    path_case: 2,
}
