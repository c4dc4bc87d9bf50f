"""Model folders that no release would have, and a process that takes one after the other as ``batchgen run`` would.

Usage: ``python hostile_folders.py SCRATCH SEED SHARE [adapter]``: one JSON object per line on stdout, with the case,
how it ended ("refused", "ran", or the error's type), the message, and the largest resident size so far. A case that
takes longer than ``MAX_S`` seconds ends with ``TimeoutError``. With "adapter" the cases are those of an adapter.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).resolve().parents[2] / "sample_data" / "tiny-lfm2"
CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
ADAPTER, MATRICES = "adapter_config.json", "adapter_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
NAMES = [CONFIG, GENERATION, WEIGHTS, INDEX, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
MAX_S = 120  # a guard against a case that never ends
ADDRESS_SPACE = 8 << 30

Change = Callable[[Path], object]  # writes one file


def content(data: bytes | str) -> Change:
    return lambda path: path.write_bytes(data.encode() if isinstance(data, str) else data)


def link(target: str) -> Change:
    return lambda path: path.symlink_to(target)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


def bound_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's address has 108 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


ODD_FILES: dict[str, Change] = {
    "a pipe": os.mkfifo,
    "an endless device": link("/dev/zero"),
    "a folder": Path.mkdir,
    "a socket": bound_socket,
    "a loop of links": lambda path: path.symlink_to(path.name),
    "a sparse file": sparse,
}
TEXTS: dict[str, bytes | str] = {
    "empty": "",
    "lists without end": "[" * 200_000,
    "nested lists": "[" * 100_000 + "]" * 100_000,
    "nested objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "a nested value": '{"eos_token_id":' + "[" * 50_000 + "]" * 50_000 + "}",
    "many lists": "[" + "[]," * 8_000_000 + "[]]",
    "no UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a number of 5,000 digits": '{"vocab_size": ' + "9" * 5000 + "}",
    "a list": "[1]",
    "null": "null",
    "NUL": "\0" * 100,
    "cut short": '{"model_type": "lfm2"',
}
VALUES: list[Any] = [
    *(True, False, -1, 0, 1, 2, 3, 7, 129, 2**31 - 1, 2**31, 2**63, 10**400, -(10**400)),
    *(1e-320, 1.5, 1e308, float("nan"), float("inf"), float("-inf")),
    *("7", "", "x" * 100_000, "\ud800", [], [10**400], [-1], [True], [1.0], [[]], [1] * 50_000, {}, {"a": None}),
    *({"rope_type": "\n\x1b[31m"}, {"rope_theta": 10**400}, ["conv"] * 6, ["full_attention"] * 6),
]
KEYS = [
    *("vocab_size", "hidden_size", "num_hidden_layers", "full_attn_idxs", "layer_types", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "block_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier"),
    *("block_auto_adjust_ff_dim", "conv_L_cache", "conv_bias", "norm_eps", "rope_theta", "rope_parameters"),
    *("rope_scaling", "max_position_embeddings", "tie_embedding", "bos_token_id", "eos_token_id", "torch_dtype"),
    *("model_type", "quantization_config"),
]
FOUND: dict[str, Any] = {  # values that were an internal error, or never ended
    "num_hidden_layers": [2**31, 10**400],
    "block_ff_dim": [10**400],
    "block_ffn_dim_multiplier": [10**400],
    "norm_eps": [10**400, 1e300],
    "rope_theta": [10**400, 1e300],
    "head_dim": [10**400],
}
BOMB = "(.*a|.*b|(x+x+)+y)*"
PATTERNS: list[Any] = [
    BOMB,
    "(?:a{1000}){1000}",
    "(" * 10_000,
    "(?=x)",
    {BOMB: 8},
    {BOMB + str(i): 8 for i in range(999)},
]
ADAPTER_KEYS = ["peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"]
ADAPTER_KEYS += ["exclude_modules", "layers_to_transform", "layers_pattern", "base_model_name_or_path", "use_dora"]
WEIGHT_FILES = ["../x.safetensors", "/dev/zero", "/x.safetensors", INDEX, ".", "", "a\0.safetensors"]
WEIGHT_FILES += ["\ud800.safetensors", "x" * 5000 + ".safetensors", "gone.safetensors", f"./{WEIGHTS}"]


def configs(rng: random.Random, count: int) -> Iterator[tuple[str, str, Change]]:
    raw = json.loads((SAMPLE / CONFIG).read_text())
    found = [(key, value) for key, values in FOUND.items() for value in values]
    drawn = [(rng.choice(KEYS), rng.choice(VALUES)) for _ in range(count)]
    for key, value in found + drawn:
        yield CONFIG, f"{key} = {json.dumps(value)[:40]}", content(json.dumps(raw | {key: value}))
    for key in rng.sample(list(raw), 8):
        less = {name: value for name, value in raw.items() if name != key}
        yield CONFIG, f"no {key}", content(json.dumps(less))
    yield CONFIG, "a key twice", content(json.dumps(raw)[:-1] + ', "num_hidden_layers": 2147483648}')
    for value in rng.sample(VALUES, 12):
        yield GENERATION, f"eos_token_id = {json.dumps(value)[:40]}", content(json.dumps({"eos_token_id": value}))


def framed(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def weights(rng: random.Random, count: int, good: Path = SAMPLE / WEIGHTS) -> Iterator[tuple[str, str, Change]]:
    """Changes of a file of weights, ``good``."""
    for what, change in changed_weights(rng, count, good.read_bytes()):
        yield good.name, what, change


def changed_weights(rng: random.Random, count: int, whole: bytes) -> Iterator[tuple[str, Change]]:
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    text, data = whole[8:end], whole[end:]
    header = json.loads(text)
    name = next(name for name in header if name != "__metadata__")
    entry = header[name]
    for length in (0, 1, end, len(whole), 2**31, 2**60, 2**64 - 1):
        yield f"a header of {length} bytes", content(framed(text, data, length))
    changes: list[dict[str, Any]] = [{key: value} for key in entry for value in (None, -1, [], "x", [2**70], [-1])]
    changes += [{"dtype": dtype} for dtype in ("F64", "I64", "BOOL", "F4", "F8_E8M0", "Q4", "C64", 7, "x" * 10_000)]
    changes += [{"shape": shape} for shape in ([0], [0, 2**63], [2**63, 2**63], [1], entry["shape"][::-1], [1.5])]
    first, last = entry["data_offsets"]
    pairs = [[last, first], [0, 0], [first, last + 1], [first, 2**63], [-1, last], [0, len(data) + 4], [1e300, 2]]
    changes += [{"data_offsets": offsets} for offsets in pairs]
    for change in changes:
        yield f"{name}: {str(change)[:40]}", content(framed(header | {name: entry | change}, data))
    for other in ({"x": entry}, {"\n\x1b[2J": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, {name: 5}):
        yield f"with {str(other)[:40]}", content(framed(header | other, data))
    yield "nested header", content(framed(b"[" * 100_000, data))
    many = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(30_000)}
    yield "30,000 tensors more", content(framed(header | many, data))
    for _ in range(count):
        broken = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(end)] = rng.randrange(256)
        yield "bytes changed in the header", content(bytes(broken))
        yield "cut short", content(whole[: rng.randrange(len(whole))])


def indexes(rng: random.Random) -> Iterator[tuple[str, str, Change]]:
    names = [n for n in json.loads((SAMPLE / WEIGHTS).read_bytes()[8:].partition(b"}}")[0] + b"}}") if n[0] != "_"]
    whole = dict.fromkeys(names, WEIGHTS)
    yield INDEX, "as it should be", content(json.dumps({"weight_map": whole}))
    files: list[Any] = [*WEIGHT_FILES, None, 5, [], {}]
    for file in files:
        changed = whole | {rng.choice(names): file}
        yield INDEX, f"names {str(file)[:40]!r}", content(json.dumps({"weight_map": changed}))
    values: tuple[Any, ...] = (None, 5, [], "x", [["a", "b"]], {})
    for value in values:
        yield INDEX, f"weight_map = {value}", content(json.dumps({"weight_map": value}))
    scattered = {f"t{i}": f"{i}.safetensors" for i in range(20_000)}
    yield INDEX, "20,000 files", content(json.dumps({"weight_map": scattered}))


def cases(seed: int) -> Iterator[tuple[str, str, Change]]:
    """File name, what is odd about it, and what writes it so."""
    rng = random.Random(seed)
    for name, (what, change) in itertools.product(NAMES, ODD_FILES.items()):
        yield name, what, change
    for name in (CONFIG, GENERATION, INDEX):
        yield from ((name, what, content(text)) for what, text in TEXTS.items())
    yield from configs(rng, 60)
    yield from weights(rng, 10)
    yield from indexes(rng)


def adapters(seed: int, good: Path) -> Iterator[tuple[str, str, Change]]:
    """As ``cases``, of the files of an adapter."""
    rng = random.Random(seed)
    for name, (what, change) in itertools.product((ADAPTER, MATRICES), ODD_FILES.items()):
        yield name, what, change
    yield from ((ADAPTER, what, content(text)) for what, text in TEXTS.items())
    raw = json.loads((good / ADAPTER).read_text())
    for key in ADAPTER_KEYS:
        for value in [*rng.sample(VALUES, 6), *PATTERNS]:
            yield ADAPTER, f"{key} = {json.dumps(value)[:40]}", content(json.dumps(raw | {key: value}))
        less = {name: value for name, value in raw.items() if name != key}
        yield ADAPTER, f"no {key}", content(json.dumps(less))
    yield from weights(rng, 10, good / MATRICES)


def use(folder: Path) -> None:
    """What a run does with a model, and with the adapter in its folder if there is one, up to two tokens."""
    from batchgen.config.load import load_job
    from batchgen.core.file_digests import Digests
    from batchgen.core.records import Request, SamplingParams
    from batchgen.run.loader import load_engine, read_model

    adapter = str(folder) if os.path.lexists(folder / ADAPTER) or os.path.lexists(folder / MATRICES) else ""
    spec = load_job(
        None,
        {
            "model": {"path": str(folder), "adapter": adapter, "device": "cpu", "dtype": "float32"},
            "input": {"path": ["-"], "prompt_token_ids": "ids"},
            "engine": {"max_num_seqs": 2, "threads": 1},
            "output": {"path": str(folder / "out")},
        },
    )
    info = read_model(spec)
    info.files.fingerprint(Digests())
    engine = load_engine(spec, info).engine
    assert len(list(engine.run([Request(0, (0,), SamplingParams(max_tokens=2))]))) == 1


def outcome(folder: Path, max_s: int) -> tuple[str, str]:
    from batchgen.core.errors import UsageError

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(max_s)
    try:
        use(folder)
    except UsageError as error:
        return "refused", str(error)
    except BaseException as error:  # all that is no refusal is what this looks for
        return type(error).__name__, str(error)[:300]
    finally:
        signal.alarm(0)
    return "ran", ""


def write_adapter(folder: Path) -> Path:
    """An adapter of the sample model."""
    from adapters import write_adapter
    from safetensors.torch import load_file

    tensors = load_file(SAMPLE / WEIGHTS).items()
    write_adapter(folder, {name.removesuffix(".weight"): weight for name, weight in tensors if "q_proj" in name})
    return folder


def main(scratch: Path, seed: int, share: float, kind: str = "model") -> None:
    rng = random.Random(seed)
    good = [*SAMPLE.iterdir()]
    all_cases = cases(seed)
    if kind == "adapter":
        adapter = write_adapter(scratch / "good")
        good += adapter.iterdir()
        all_cases = adapters(seed, adapter)
    chosen = [case for case in all_cases if rng.random() < share]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for number, (name, what, change) in enumerate([("", "nothing", None), *chosen]):
        folder = scratch / f"model-{number}"
        folder.mkdir(parents=True)
        for file in good:
            if file.name != name:
                (folder / file.name).symlink_to(file)
        if change is not None:
            change(folder / name)
        ended, message = outcome(folder, MAX_S if number else 0)  # the first compiles kernels: no limit
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"case": f"{name}: {what}", "ended": ended, "said": message, "peak_bytes": peak}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
