"""The job file and its flags: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import re
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config.job import KEYS, EngineConfig, JobSpec
from batchgen.config.load import job_from_dict, load_job
from batchgen.core.errors import UsageError
from batchgen.core.units import (
    Shard,
    format_duration,
    parse_clock,
    parse_count,
    parse_duration,
    parse_share,
    parse_size,
)

NEEDED = {"model": {"path": "dummy:LFM2-350M"}, "input": {"path": "in.jsonl"}, "output": {"path": "out"}}


def from_text(folder: Path, text: str, flags: dict[str, dict[str, Any]] | None = None) -> JobSpec:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return load_job(path, flags)


def minimal(extra: str = "") -> str:
    return f'[model]\npath = "m/n"\n[output]\npath = "out"\n[input]\npath = "in.jsonl"\n{extra}'


def with_flags(section: str, key: str, value: object) -> dict[str, dict[str, Any]]:
    flags = {name: dict(values) for name, values in NEEDED.items()}
    flags.setdefault(section, {})[key] = value
    return flags


def test_a_minimal_job_has_the_documented_defaults(tmp_path: Path) -> None:
    spec = from_text(tmp_path, minimal())
    assert (spec.model.revision, spec.model.dtype, spec.model.device) == ("main", "auto", "auto")
    assert (spec.input.format, spec.input.chat_template, spec.input.columns) == ("auto", "auto", ("*",))
    assert (spec.sampling.max_tokens, spec.sampling.temperature) == (256, 0.0)
    assert spec.engine == EngineConfig()
    assert set(spec.to_dict()["engine"].values()) == {"auto"}
    assert (spec.output.format, spec.output.token_ids) == ("auto", False)


def test_paths_in_the_file_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    (tmp_path / "models" / "m").mkdir(parents=True)
    text = '[model]\npath="models/m"\n[input]\npath=["a.jsonl","b/*.jsonl"]\n[output]\npath="../o"\n'
    spec = from_text(tmp_path, text)
    assert spec.model.path == str(tmp_path / "models/m")
    assert spec.input.path == (str(tmp_path / "a.jsonl"), str(tmp_path / "b/*.jsonl"))
    assert spec.output.path == str(tmp_path.parent / "o")


def test_paths_in_flags_are_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_job(None, NEEDED).input.path == (str(tmp_path / "in.jsonl"),)


def test_models_that_are_no_folders_and_inputs_that_are_no_files_keep_their_names(tmp_path: Path) -> None:
    for name in ("LiquidAI/LFM2-350M", "dummy:LFM2-350M"):
        assert from_text(tmp_path, minimal().replace("m/n", name)).model.path == name
    for path in ("-", "hf:openai/gsm8k?config=main&split=test", "s3://b/a/*.zst", "HTTPS://h/../x"):
        assert from_text(tmp_path, minimal().replace("in.jsonl", path)).input.path == (path,)


@pytest.mark.parametrize("name", ["csvs", "./csvs", "up/../csvs"])
def test_a_folder_of_data_is_relative_to_the_job_file_wherever_the_job_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for folder in ("job/csvs", "job/up", "elsewhere/csvs"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    spec = from_text(tmp_path / "job", minimal().replace("in.jsonl", f"hf:{name}?split=train"))
    assert spec.input.path == (f"hf:{tmp_path}/job/csvs?split=train",)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"engine": {"gpu_memory_utilization": 0.9}}, r"flags: engine\.gpu_memory_utilization: unknown key"),
        ({"sampling": {"max_new_tokens": 9}}, r"sampling\.max_new_tokens: unknown key \(here it is sampling\.max_tok"),
        ({"engin": {}}, r"flags: unknown section \[engin\]"),
        ({"vocabulary": {}}, r"unknown section \[vocabulary\] \(known: model, input, "),
        ({"engine": 5}, "flags: engine = 5: must be a section"),
        ({"input": {"path": ["https://host/a b?sig=hush", 3]}}, r"\['https://host/a b\?\*\*\*\w{8}', 3\]: must be"),
    ],
)
def test_flags_of_unknown_names_are_refused(tmp_path: Path, flags: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_text(tmp_path, minimal(), flags)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    flags = {"sampling": {"max_tokens": 3}, "engine": {"kv_cache_memory": "1GiB"}}
    spec = from_text(tmp_path, minimal("[sampling]\nmax_tokens = 9\nseed = 4\n"), flags)
    assert (spec.sampling.max_tokens, spec.sampling.seed, spec.engine.kv_cache_memory) == (3, 4, 1 << 30)


def test_a_flag_that_says_what_the_prompt_is_replaces_the_files_word(tmp_path: Path) -> None:
    spec = from_text(tmp_path, minimal('prompt = "{q}"\n'), {"input": {"messages": "chat"}})
    assert (spec.input.prompt, spec.input.messages) == (None, "chat")


def test_environment_variables_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BG_DATA", "/data")
    spec = from_text(tmp_path, minimal('prompt = "costs $${BG_DATA} {x}"\n').replace("in.jsonl", "${BG_DATA}/a.jsonl"))
    assert spec.input.path == ("/data/a.jsonl",)
    assert spec.input.prompt == "costs ${BG_DATA} {x}"


def test_an_undefined_environment_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BG_NOWHERE", raising=False)
    with pytest.raises(UsageError, match=r"job\.toml:6: input\.path = .*the environment has no BG_NOWHERE"):
        from_text(tmp_path, minimal().replace("in.jsonl", "${BG_NOWHERE}"))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("max_tokens = 1\n", r"input\.max_tokens: unknown key \(it belongs in \[sampling\]\)"),
        ("[enigne]\n", r'unknown section \[enigne\] \(did you mean "engine"'),
        ('chat_template = "none.jinja"\n', r"input\.chat_template = 'none.jinja': cannot read .*none\.jinja: No"),
        ('format = "json"\n', r'must be one of auto, jsonl.*did you mean "jsonl"'),
        ('columns = ["*", "a"]\n', r'"\*" alone for all columns'),
        ('id = ""\n', r"input\.id = '': must be a string that is not empty"),
        ('prompt = "a"\nmessages = "b"\n', r"input\.prompt and input\.messages exclude each other"),
        ('chat_template = "none"\nsystem = "s"\n', "input.system needs a chat template, and input.chat_template"),
        ("[sampling]\nmax_tokens = 0\n", r"job\.toml:8: sampling\.max_tokens: .*0"),
        ('[sampling]\npreset = "model"\n', r"sampling\.preset: unknown key \(.*here it is sampling\.generation_config"),
        ('generation_config = "auto"\n', r"input\.generation_config: unknown key \(it belongs in \[sampling\]\)"),
        (
            "[sampling]\nn = 2\n[classify]\nlabels = ['a', 'b']\n",
            r"job\.toml:8: sampling\.n: n = 2 does not go with",
        ),
        ('[sampling]\nchoices = ["a", "b"]\n', r"sampling\.choices: unknown key \(.*here it is classify\.labels\)"),
        ('[sampling]\nlabels = ["a", "b"]\n', r"sampling\.labels: unknown key \(it belongs in \[classify\]\)"),
        ('[sampling]\nstop = ""\n', r"job\.toml:8: sampling\.stop: stop = '' holds an empty string"),
        ("[sampling\n", r"job\.toml: not valid TOML: .*line 7"),
    ],
)
def test_what_cannot_work_is_refused_by_name_and_line(tmp_path: Path, extra: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_text(tmp_path, minimal(extra))


REFUSED_FLAGS: list[tuple[str, object, str]] = [
    ("output.format", "xml", "must be one of auto, jsonl, csv, parquet, openai-batch$"),  # each is listed once
    *(
        (f"{section}.path", f"{scheme}://bucket/x", f"{scheme}:// is not a local path: copy the file")
        for section in ("model", "output")
        for scheme in ("s3", "gs", "http", "https", "hdfs")
    ),
    ("input.path", ["hdfs://a/b"], "hdfs:// is not supported here; supported: s3://"),
    *(("input.path", [f"{file}:///x"], "is a URL: write the path without file://") for file in ("file", "FILE")),
    ("input.path", ["-", "a.jsonl"], "cannot be combined"),
    *(
        ("model.device", device, r"^--device = '.*': must be one of auto, cpu, cuda, mps, xpu or cuda:N")
        for device in ("cuda:", "gpu", "cuda:-1", "cuda:x", "cpu:0", "cuda:0\n", "xpu:1", "cuda:99999", "cuda:\u0661")
    ),
    *(
        ("cluster.workers", value, "^--workers = .*must be a number of workers")
        for value in (0, "2:1", "0:2", "2:", ":2", 1.5, "\u0663")
    ),
    ("cluster.workers", "65537", "^--workers = .*up to 65536"),
    *(("cluster.ray", value, "^--ray = .*must be auto or HOST:PORT") for value in ("head", "head:", "a b:1", 5)),
    ("cluster.ray", "ray://head:10001", "^--ray = .*the driver must be on a node of the cluster"),
    ("cluster.load_timeout", "0s", "^--load-timeout = .*must be a duration"),
    *(("cluster.step_timeout", value, "^--step-timeout = .*must be a duration") for value in ("0s", 0, -1)),
    *(
        ("cluster.resources", value, "^--ray-resources = .*must be an object")
        for value in ("{", "[1]", {"spot": 0}, {"spot": True}, {"a": "b"})
    ),
]


def test_a_flag_of_an_impossible_value_is_refused_by_its_own_name_in_one_line() -> None:
    wrong = []
    for name, value, words in REFUSED_FLAGS:
        try:
            load_job(None, with_flags(*name.split("."), value))
            said = "taken"
        except UsageError as error:
            said = str(error)
        if not re.search(words, said) or "\n" in said:
            wrong.append((name, value, said))
    assert not wrong


@pytest.mark.parametrize("section", ["model", "input", "output"])
def test_what_is_missing_is_said_with_its_section_and_flag(section: str, tmp_path: Path) -> None:
    flags = {name: values for name, values in NEEDED.items() if name != section}
    with pytest.raises(UsageError, match=rf"^--{section} is missing \("):
        load_job(None, flags)
    text = minimal().replace(f"[{section}]\npath", f"[{section}]\n#")
    said = rf"job\.toml: {section}\.path is missing: set it in \[{section}\] or .*--{section}"
    with pytest.raises(UsageError, match=said):
        from_text(tmp_path, text)


def test_a_command_without_input_and_output_needs_the_model_alone() -> None:
    spec = load_job(None, {"model": NEEDED["model"], "engine": {"threads": 2}}, needs=("model",))
    assert (spec.input.path, spec.output.path, spec.engine.threads) == ((), "", 2)
    with pytest.raises(UsageError, match=r"^--model is missing"):
        load_job(None, {"engine": {"threads": 2}}, needs=("model",))


def test_a_job_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name, words in (
        ("no.toml", "cannot read the job file"),
        ("binary.toml", "not a text file in UTF-8"),
        ("/dev/null", "/dev/null is a device"),
    ):
        with pytest.raises(UsageError, match=words) as refusal:
            load_job(tmp_path / name)
        assert "\n" not in str(refusal.value)


def test_a_job_file_may_come_through_a_pipe_and_is_refused_if_it_is_endless(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "job.toml")
    (tmp_path / "text").write_text(minimal())
    with subprocess.Popen(["sh", "-c", f"cat '{tmp_path}/text' > '{pipe}'"]):
        assert load_job(pipe).output.path == str(tmp_path / "out")
    with subprocess.Popen(["sh", "-c", f"yes '# x' > '{pipe}'"], stderr=subprocess.DEVNULL) as writer:
        try:
            with pytest.raises(UsageError, match="larger than 16 MiB"):
                load_job(pipe)
        finally:
            writer.terminate()


def test_relative_paths_are_refused_where_the_working_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match=r"in\.jsonl is relative, and the working directory cannot be found"):
        load_job(None, NEEDED)
    flags = {"model": {"path": "/m"}, "input": {"path": ["/in.jsonl"]}, "output": {"path": "/out"}}
    assert load_job(None, flags).output.path == "/out"


LONG = "x" * 300


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[input]\npath = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("[input.path" + ".a" * 5000 + "]\nb = 1", "input.path: nested too deeply"),
        ("[input]\nlimit = " + "9" * 5000, "a number of too many digits"),
        ("[input]\nlimit = 0x" + "f" * 5000, r"limit = \(a huge int\): must be an integer of at least 1 and at most"),
        ("[sampling]\nstop = [0x" + "f" * 5000 + "]", r"stop = \(a huge list\) must be a string or a list"),
        ("[engine]\nkv_cache_memory = '" + "9" * 400 + "GiB'", "below 8 EiB"),
        ('[output]\npath = "a\\u0000b"', "output.path = .*: holds a NUL"),
        (f'[output]\npath = "{LONG}"', "output.path = .*: is too long for a path"),
        ('[input]\npath = ["ok", "a\\u0000b"]', "input.path = .*: holds a NUL"),
        (f'[input]\npath = "hf:{LONG}"', "input.path = .*: is too long for a path"),
        ('[model]\npath = "a\\u0000b"', "model.path = .*: holds a NUL"),
        (f'[model]\npath = "{LONG}"', "model.path = .*: is too long for a path"),
        (f'[model]\npath = "m"\ntokenizer = "{LONG}"', "model.tokenizer = .*: is too long for a path"),
        ('[input]\npath = "~nobody-here/x"', "input.path = .*: has a ~ that does not name a folder"),
    ],
    ids=lambda value: value[:24],
)
def test_values_that_break_parsers_or_files_are_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refusal:
        from_text(tmp_path, text)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("section", ["model", "input", "output"])
@pytest.mark.parametrize("secret", ["s3://key:hush@bucket/x", "https://user:hush@host/x", "hf:https://u:hush@h/x"])
def test_an_address_with_a_secret_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, secret: str
) -> None:
    with pytest.raises(UsageError, match=r"--(model|input|output) = .*(s3|https)://\*\*\*") as caught:
        load_job(None, with_flags(section, "path", ["a.jsonl", secret] if section == "input" else secret))
    assert "hush" not in str(caught.value)
    monkeypatch.setenv("WHERE", secret)
    with pytest.raises(UsageError) as caught:
        from_text(tmp_path, minimal().replace('"in.jsonl"', '"${WHERE}"'))
    assert "hush" not in str(caught.value)


def test_a_variable_that_seems_to_hold_a_secret_is_not_written_into_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "db_password", "SECRET_1"):
        monkeypatch.setenv(name, "hush")
        with pytest.raises(UsageError, match=rf"job.toml:\d+: input.prompt: {name} seems to hold a secret") as caught:
            from_text(tmp_path, minimal(f'prompt = "${{{name}}} {{x}}"\n'))
        assert "hush" not in str(caught.value)
    for name in ("MAX_TOKENS", "DATA_DIR", "KEYBOARD", "TOKENIZER", "PUBLIC_KEYS"):
        monkeypatch.setenv(name, "shown")
        assert from_text(tmp_path, minimal(f'prompt = "${{{name}}} {{x}}"\n')).input.prompt == "shown {x}"


def test_a_secret_variable_may_be_where_an_address_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAS_TOKEN", "sig=hush")
    spec = from_text(tmp_path, minimal().replace('"in.jsonl"', '"https://host/x.jsonl?${SAS_TOKEN}"'))
    assert spec.input.path == ("https://host/x.jsonl?sig=hush",)
    assert "hush" not in json.dumps(spec.to_dict())


def test_an_input_where_files_are_published_is_refused(tmp_path: Path) -> None:
    flags = {"input": {"path": ["s3://b/rows/in.jsonl"]}, "output": {"publish": "s3://b/rows"}}
    with pytest.raises(UsageError, match=r"in\.jsonl lies in s3://b/rows, where files are replaced"):
        from_text(tmp_path, minimal(), flags)


def test_an_output_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UsageError, match="is a file"):
        from_text(tmp_path, minimal())


@pytest.mark.parametrize(
    ("section", "value", "words"),
    [
        ("input", {"path": 3}, "input.path = 3: must be"),
        ("input", {"path": ["in"], "unknown": 1}, "unknown"),
        ("sampling", [1], "must be a section"),
        ("output", {}, "lacks output.path"),
        ("engine", {"threads": 0}, "engine.threads = 0: must be"),
        ("sampling", {"n": "many"}, "sampling.n: n = 'many' must be"),
    ],
    ids=str,
)
def test_a_spec_edited_into_another_shape_is_refused(tmp_path: Path, section: str, value: object, words: str) -> None:
    data = from_text(tmp_path, minimal()).to_dict() | {section: value}
    with pytest.raises(UsageError, match=f"cannot read job.json: .*{words}"):
        job_from_dict(data)


def test_engine_sizes_do_not_count_as_changing_outputs() -> None:
    keys = load_job(None, NEEDED).output_keys().keys()
    assert {"input.prompt", "sampling.seed", "output.token_ids"} <= keys
    assert not {"engine.kv_cache_memory", "engine.threads", "engine.max_num_seqs", "output.path"} & keys
    assert not {"model.dtype", "model.device"} & keys, "these are compared by what they come to"


def test_integers_come_back_from_a_manifest_and_change_outputs() -> None:
    model = {**NEEDED["model"], "quantization": "w8a8"}
    spec = load_job(None, {**NEEDED, "model": model})
    assert (spec.model.weights, spec.model.activations) == ("int8", "int8")
    assert job_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert spec.output_keys()["model.quantization"] == "w8a8"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15", "mps", "xpu"])
def test_a_device_may_carry_a_number(device: str) -> None:
    assert load_job(None, with_flags("model", "device", device)).model.device == device


def test_every_key_says_what_it_is_for() -> None:
    for keys in KEYS.values():
        for item in keys.values():
            assert item.help and not item.help.endswith("."), item.name


# ---------------------------------------------------------------- [cluster]


def spec_of(**cluster: Any) -> JobSpec:
    return load_job(None, {**NEEDED, "cluster": cluster})


@pytest.mark.parametrize(
    ("workers", "bounds"), [(8, (1, 8)), ("8", (1, 8)), ("2:8", (2, 8)), ("3:3", (3, 3)), ("auto", None), ("", None)]
)
def test_workers_are_a_number_a_range_or_chosen(workers: object, bounds: tuple[int, int] | None) -> None:
    cluster = spec_of(workers=workers).cluster
    assert (cluster.bounds, cluster.is_used) == (bounds, workers != "")


def test_a_ray_cluster_is_used_without_a_number_of_workers() -> None:
    cluster = spec_of(ray="10.0.0.1:6379").cluster
    assert (cluster.bounds, cluster.is_used) == (None, True)


def test_no_key_of_the_cluster_changes_outputs() -> None:
    assert all(key.resume == "free" for key in KEYS["cluster"].values())
    given = {"workers": "2:4", "ray": "auto", "cpus_per_worker": 2, "gpus_per_worker": 0, "resources": {"spot": 0.01}}
    spec = spec_of(**given, step_timeout="3s", load_timeout="9m")
    assert spec.output_keys() == spec_of().output_keys()
    assert job_from_dict(spec.to_dict()) == spec, "job.json holds it whole"


def test_a_job_file_and_flags_say_the_same(tmp_path: Path) -> None:
    text = '[cluster]\nworkers = "2:4"\nstep_timeout = "1m30s"\nresources = { spot = 0.5 }\n'
    spec = from_text(tmp_path, text, {**NEEDED, "cluster": {"workers": "3", "resources": '{"gpu_a": 1}'}})
    assert (spec.cluster.bounds, spec.cluster.step_timeout_s) == ((1, 3), 90.0)
    assert spec.cluster.resources == {"gpu_a": 1.0}
    begun = load_job(None, {"cluster": {"workers": "65536"}}, begun=spec.to_dict())
    assert (begun.cluster.bounds, begun.cluster.resources, begun.input) == ((1, 65536), {"gpu_a": 1.0}, spec.input)


# ---------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "size"),
    [("123", 123), ("4GiB", 4 << 30), ("4G", 4 << 30), ("4GB", 4 * 10**9), ("1.5KiB", 1536), ("7b", 7)],
)
def test_sizes_take_binary_and_decimal_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(0, 50), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_durations_add_up(days: int, hours: int, minutes: int, seconds: int) -> None:
    written = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    assert parse_duration(f"{days}d{hours}h {minutes}m{seconds}s") == written.total_seconds()


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_size, text) for text in ("4XB", "9" * 400, "8388608TiB")),
        *((parse_duration, text) for text in ("soon", "")),
        *((parse_share, text) for text in ("5", "-1%", "5%x")),
        *((Shard.parse, text) for text in ("0/3", "4/3", "1", "1/" + "9" * 5000)),
        *((parse_count, text) for text in ("0", "9" * 5000, "-4", "1.5")),
    ],
)
def test_values_without_sense_are_refused(parse: Any, text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse(text)


def test_shares_and_shards_are_understood() -> None:
    assert (parse_share("5%"), parse_share("0.25")) == (0.05, 0.25)
    assert (Shard.parse("2/8"), parse_count("7")) == (Shard(2, 8), 7)


def test_a_clock_time_is_the_next_of_its_kind() -> None:
    now = datetime(2026, 3, 1, 12, 0).astimezone()
    assert parse_clock("12:01", now) == now + timedelta(minutes=1)
    assert parse_clock("12:00", now) == datetime(2026, 3, 2, 12, 0).astimezone()
    assert parse_clock("2026-03-05T05:55", now) == datetime(2026, 3, 5, 5, 55).astimezone()
    with pytest.raises(ValueError, match="must be a clock time"):
        parse_clock("25:00", now)


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.2, "4.2 s"), (185, "3m 05s"), (7620, "2h 07m"), (273600, "3d 04h"), (59.97, "60.0 s")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
