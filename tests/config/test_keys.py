"""Every declared key: bounds, choices, values of wrong types, names nearly right; as a flag and in a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.job import KEYS, JobSpec
from batchgen.config.load import job_from_dict, load_job
from batchgen.core.errors import UsageError
from batchgen.core.keys import Key

DECLARED = [(section, name) for section, keys in KEYS.items() for name in keys]
NEEDED = {"model": {"path": "dummy:LFM2-350M"}, "input": {"path": ["in.jsonl"]}, "output": {"path": "out"}}
# The least and the largest value of each number; a switch of the sampler may give one of them another meaning.
_BOUNDS = """
    input.limit 1 9223372036854775807, engine.max_num_batched_tokens 1 1048576, engine.max_num_seqs 1 65536,
    engine.block_size 1 65536, engine.max_model_len 1 9223372036854775807, engine.threads 1 9223372036854775807,
    cluster.cpus_per_worker 1 65536, cluster.gpus_per_worker 0 1024, embed.dimensions 1 1048576,
    sampling.max_tokens 0 2147483647, sampling.min_tokens 0 2147483647, sampling.temperature 0.0 9.999999999999999e299,
    sampling.top_p 5e-324 1.0, sampling.top_k -1 2147483647, sampling.min_p 0.0 1.0,
    sampling.repetition_penalty 0.01 100.0, sampling.presence_penalty -2.0 2.0, sampling.frequency_penalty -2.0 2.0,
    sampling.seed -9223372036854775808 9223372036854775807, sampling.n 1 128, sampling.logprobs 0 2147483647,
    sampling.prompt_logprobs 0 2147483647, sampling.thinking_token_budget -1 2147483647,
    sampling.max_repeats 0 2147483647
"""
BOUNDS = {
    where: (json.loads(low), json.loads(high)) for where, low, high in re.findall(r"([\w.]+) (\S+) ([^,\s]+)", _BOUNDS)
}
NONSENSE: list[Any] = [
    *(float("nan"), float("inf"), -float("inf"), 10**400, -(10**5000), 1e308, True, [], {}, {"a": []}),
    *([[]], [{}], [None], [True], b"\xff", "nonsense", "\x00", "", "7", "²", "٣", "\udcff", "1e400"),
]


def with_flag(section: str, name: str, value: object) -> JobSpec:
    return load_job(None, NEEDED | {section: {**NEEDED.get(section, {}), name: value}})


def refusal(section: str, name: str, value: object) -> str:
    """What is said of a value; "" if it is taken."""
    try:
        with_flag(section, name, value)
    except UsageError as error:
        return str(error)
    return ""


def is_number(item: Key) -> bool:
    return item.kind.metavar in ("N", "N|auto", "NUMBER", "K")


def may_be(item: Key) -> tuple[type, ...]:
    """The types of values that a key may take."""
    if is_number(item) or not item.kind.metavar:
        return () if item.kind.metavar in ("N", "N|auto", "NUMBER") else (bool,)
    of_json = (str, dict, list)
    some = {"JSON": of_json, "JSON|FILE": of_json, "IDS": (list,), "SIZE|auto": (str,), "true|false|auto": (bool,)}
    return some.get(item.kind.metavar, (str, list))


def test_a_number_has_its_bounds() -> None:
    assert {f"{section}.{name}" for section, name in DECLARED if is_number(KEYS[section][name])} == BOUNDS.keys()
    for where, bounds in BOUNDS.items():
        section, _, name = where.partition(".")
        for bound, direction in zip(bounds, (-1, 1), strict=True):
            KEYS[section][name].kind.parse(bound)
            beyond = bound + direction if isinstance(bound, int) else math.nextafter(bound, direction * math.inf)
            for wrong in (beyond, bound + 0.5) if isinstance(bound, int) and abs(bound) < 2**31 else (beyond,):
                with pytest.raises(ValueError, match="must be"):
                    KEYS[section][name].kind.parse(wrong)


def test_a_value_of_a_wrong_type_is_refused_in_one_line_by_flag_or_by_its_place_in_the_file(tmp_path: Path) -> None:
    said: dict[Any, str] = {}
    for section, name in DECLARED:
        item = KEYS[section][name]
        for value in NONSENSE:
            if item.kind.choices or type(value) not in may_be(item):
                said[section, item.flag, len(said)] = refusal(section, name, value)
        (tmp_path / "job.toml").write_text(f"\n[{section}]\n{name} = [[]]\n", encoding="utf-8")
        with pytest.raises(UsageError, match=rf"job\.toml:3: {section}\.{name}\b"):
            load_job(tmp_path / "job.toml", {place: NEEDED[place] for place in NEEDED if place != section})
    assert len(said) > 1000
    assert not {key: line for key, line in said.items() if not line.startswith(f"--{key[1]}")}
    assert not [line for line in said.values() if "\n" in line or len(line) > 300]


def test_a_name_nearly_right_is_refused_with_the_right_one(tmp_path: Path) -> None:
    for section, name in DECLARED:
        wrong = f"{name[:-2]}{name[-1]}{name[-2:-1]}"
        (tmp_path / "job.toml").write_text(f"[{section}]\n{wrong}x = 1\n", encoding="utf-8")
        hint = f'did you mean "{name}"' if len(name) > 5 else "known: |did you mean"
        with pytest.raises(UsageError, match=rf"job\.toml:2: {section}\.{wrong}x: unknown key \({hint}"):
            load_job(tmp_path / "job.toml", NEEDED)


# What needs another key beside it.
NOT_ALONE = [("path", ""), ("path", ()), ("regenerate", "assistant"), ("max_tokens", 0), ("min_tokens", 2**31 - 1)]
NOT_ALONE += [("labels", ["x"]), ("generation_config", "auto")]  # whose values a run reads from the model first


def fitting(where: str, item: Key) -> Iterator[object]:
    yield from item.kind.choices
    if item.default is not None:
        yield item.default
    if where in BOUNDS:
        yield from BOUNDS[where]
    more = {"": [True, False], "TEXT": [["x"] if item.kind.repeats else "x"], "COLUMN": ["a"], "IDS": [[7, 2]]}
    more |= {"JSON": [{"7": 1}], "JSON|FILE": ['{"regex": "a"}'], "SIZE|auto": ["1GiB"], "DURATION": ["3s"]}
    yield from {**more, "A,B|*": [["a", "b"]], "N|MIN:MAX|auto": ["2:4"]}.get(item.kind.metavar, [])


def test_a_fitting_value_comes_back_from_the_run_directory() -> None:
    for section, name in DECLARED:
        for value in fitting(f"{section}.{name}", KEYS[section][name]):
            if (name, value) not in NOT_ALONE:
                spec = with_flag(section, name, value)
                assert job_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec, (section, name, value)
