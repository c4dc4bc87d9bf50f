"""Strict loading: exactly the tensors the config asks for, from safetensors of this folder, or one clear line."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_kernels import ReferenceKernels
from safetensors.torch import save_file
from tiny_model import CPU, RecordedTensors, prefix_logits, raw_config, tiny_model, write_checkpoint
from torch import Tensor

from batchgen.core.errors import ExitCode, ModelError
from batchgen.model import weights
from batchgen.model.decoder import Decoder
from batchgen.model.load import resolve_device, resolve_dtype
from batchgen.model.registry import load_config, parse_config, read_config
from batchgen.model.weights import Checkpoint, RandomTensors, open_weights

INDEX = "model.safetensors.index.json"
PROMPT = [9, 30, 77, 12, 5]


def load_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = read_config(folder)
    return Decoder(config, Checkpoint(folder, dtype, CPU), ReferenceKernels())


def refusal(folder: Path) -> str:
    """The one line with which loading the folder fails."""
    with pytest.raises(ModelError) as caught:
        load_folder(folder)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def write_shards(folder: Path, **changes: object) -> dict[str, Tensor]:
    """A checkpoint of three files with an index."""
    tensors = write_checkpoint(folder, **changes)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, folder / file)
        weight_map.update(dict.fromkeys(names[number::3], file))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tensors


def rewrite_index(folder: Path, name: str, file: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].pop(name, None)
    if file is not None:
        index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("changes", [{}, {"tie_embedding": False}, {"conv_bias": True}], ids=str)
def test_a_checkpoint_is_loaded_as_it_was_written(tmp_path: Path, changes: dict[str, object]) -> None:
    tensors = write_checkpoint(tmp_path, **changes)
    source = RecordedTensors()
    config = parse_config(raw_config(**changes), "tiny")
    expected = prefix_logits(Decoder(config, source, ReferenceKernels()), PROMPT)
    assert source.tensors.keys() == tensors.keys()
    assert torch.equal(prefix_logits(load_folder(tmp_path), PROMPT), expected)


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one")
    write_shards(tmp_path / "three")
    one, three = load_folder(tmp_path / "one"), load_folder(tmp_path / "three")
    assert torch.equal(prefix_logits(one, PROMPT), prefix_logits(three, PROMPT))


def test_weights_are_cast_to_the_dtype_asked_for(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    model = load_folder(tmp_path, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.embedding(torch.arange(128)), tensors["model.embed_tokens.weight"].bfloat16())


def test_tensors_are_found_under_the_names_of_their_family(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    expected = prefix_logits(load_folder(tmp_path), PROMPT)
    save_file({f"other.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    names = {role: f"other.{name}" for role, name in config.tensor_names.items()}
    model = Decoder(replace(config, tensor_names=names), Checkpoint(tmp_path, torch.float32, CPU), ReferenceKernels())
    assert torch.equal(prefix_logits(model, PROMPT), expected)


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_tied_embedding_is_one_table_with_it(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in write_checkpoint(tmp_path).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = load_folder(tmp_path)
    save_file({**tensors, HEAD: tensors[TABLE].clone()}, tmp_path / "model.safetensors")
    model = load_folder(tmp_path)
    assert model.config.tie_embedding
    assert model.numerics == expected.numerics
    assert torch.equal(prefix_logits(model, PROMPT), prefix_logits(expected, PROMPT))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_head_that_differs_from_the_embedding_is_used_though_the_config_says_tied(
    tmp_path: Path, *, is_sharded: bool
) -> None:
    tensors = write_checkpoint(tmp_path, tie_embedding=False)
    expected = prefix_logits(load_folder(tmp_path), PROMPT)
    write_checkpoint(tmp_path, tie_embedding=True)
    if is_sharded:
        (tmp_path / "model.safetensors").unlink()
        save_file({name: tensors.pop(name) for name in (HEAD,)}, tmp_path / "head.safetensors")
        save_file(tensors, tmp_path / "rest.safetensors")
        names = dict.fromkeys(tensors, "rest.safetensors") | {HEAD: "head.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    model = load_folder(tmp_path)
    assert torch.equal(prefix_logits(model, PROMPT), expected)
    assert not model.config.tie_embedding
    assert model.numerics["head"] == "untied"  # a run that was begun with the other one is not resumed


def test_a_head_is_compared_with_the_embedding_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    save_file({**tensors, HEAD: tensors[TABLE].bfloat16()}, tmp_path / "model.safetensors")
    assert load_folder(tmp_path, torch.bfloat16).config.tie_embedding
    assert not load_folder(tmp_path, torch.float32).config.tie_embedding


@pytest.mark.parametrize(
    ("head", "said"), [(torch.zeros(130, 64), "has shape [130, 64]"), (torch.zeros(128, 64, dtype=torch.int8), "int8")]
)
def test_a_head_that_cannot_be_used_is_refused_under_a_config_that_says_tied(
    tmp_path: Path, head: Tensor, said: str
) -> None:
    save_file({**write_checkpoint(tmp_path), HEAD: head}, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert HEAD in message
    assert said in message


def test_one_file_of_weights_comes_before_the_index_of_others_as_in_transformers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", conv_bias=True)
    expected = prefix_logits(load_folder(tmp_path / "one"), PROMPT)
    write_shards(tmp_path / "both")
    write_checkpoint(tmp_path / "both", conv_bias=True)
    assert torch.equal(prefix_logits(load_folder(tmp_path / "both"), PROMPT), expected)


def _with(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: torch.zeros(64)}


UNUSED = (
    *("lm_head.bias", "score.weight", "classifier.weight", "model.layers.4.operator_norm.weight"),
    *("model.layers.1.self_attn.q_proj.bias", "model.layers.0.conv.conv.bias", "model.layers.0.feed_forward.gate"),
    *("model.layers.0.conv.q_layernorm.weight", "linear.weight", "mtp.norm.weight", "model.norm.weight"),
)
CONV, W1 = "model.layers.0.conv.conv.weight", "model.layers.0.feed_forward.w1.weight"


@pytest.mark.parametrize(
    ("changes", "change", "words"),
    [
        ({}, lambda t: t | {"model.layers.0.gate": torch.zeros(2)}, ["unknown tensor 'model.layers.0.gate'"]),
        *(({}, _with(name), [f"unknown tensor '{name}'"]) for name in UNUSED),
        ({}, lambda t: t | {CONV: t[CONV].squeeze(1)}, [f"'{CONV}'"]),  # without its middle axis
        ({}, lambda t: t | {W1: t[W1].to(torch.int8)}, [f"'{W1}'", "int8"]),
        ({"tie_embedding": False}, lambda t: t.pop("lm_head.weight") is None or t, ["lack tensor 'lm_head.weight'"]),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path,
    changes: dict[str, Any],
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    words: list[str],
) -> None:
    save_file(change(write_checkpoint(tmp_path, **changes)), tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert all(word in message for word in words)


def test_every_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    for name in tensors:
        save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
        assert f"lack tensor '{name}'" in refusal(tmp_path)


def test_every_tensor_of_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        longer = torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])
        save_file({**tensors, name: longer}, tmp_path / "model.safetensors")
        message = refusal(tmp_path)
        assert f"'{name}'" in message
        assert str(list(longer.shape)) in message
        assert str(list(tensor.shape)) in message


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("head", [b"", b"\xff" * 64, b"PK\x03\x04"])
def test_a_truncated_or_foreign_file_is_named(tmp_path: Path, share: float, head: bytes) -> None:
    write_checkpoint(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(head + content[: int(share * len(content))])
    message = refusal(tmp_path)
    assert "model.safetensors" in message and "download it again" in message


PICKLES = ["pytorch_model.bin", "model.pt", "consolidated.pth", "model.ckpt"]


@pytest.mark.parametrize("name", [*PICKLES, "adapter_model.safetensors", "rotary frequencies, as old checkpoints have"])
def test_what_is_not_a_tensor_of_the_model_is_not_looked_at(tmp_path: Path, name: str) -> None:
    tensors = write_checkpoint(tmp_path)
    expected = prefix_logits(load_folder(tmp_path), PROMPT)
    if name in PICKLES:
        torch.save({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, tmp_path / name)
    elif name == "adapter_model.safetensors":
        (tmp_path / name).write_bytes(b"junk")
    else:
        more = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
        save_file({**tensors, **more}, tmp_path / "model.safetensors")
    assert torch.equal(prefix_logits(load_folder(tmp_path), PROMPT), expected)
    (tmp_path / "model.safetensors").unlink()
    assert name not in PICKLES or "only safetensors" in refusal(tmp_path)


@pytest.mark.parametrize(("most_mapped", "times"), [(1 << 30, 2), (0, 8)])
def test_a_file_is_opened_once_for_all_its_tensors_until_much_of_it_is_mapped(
    most_mapped: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"{number}": torch.full((4,), float(number)) for number in range(8)}
    for file, names in (("a", "01234"), ("b", "567")):
        save_file({name: tensors[name] for name in names}, tmp_path / f"{file}.safetensors")
    index = {name: f"{'a' if name < '5' else 'b'}.safetensors" for name in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    files: list[Path] = []
    monkeypatch.setattr(weights, "_MAX_MAPPED", most_mapped)
    monkeypatch.setattr(weights, "open_weights", lambda path: files.append(path) or open_weights(path))
    source = Checkpoint(tmp_path, torch.float32, CPU)
    files.clear()
    for name, tensor in tensors.items():
        assert torch.equal(source.take(name, (4,)), tensor)
    assert len(files) == times


def test_an_index_must_agree_with_its_files(tmp_path: Path) -> None:
    name = "model.embedding_norm.weight"
    write_shards(tmp_path)
    where = json.loads((tmp_path / INDEX).read_text())["weight_map"][name]
    rewrite_index(tmp_path, name, None)
    assert f"{where} disagree about tensor '{name}'" in refusal(tmp_path)
    other = next(f"model-0000{n}-of-00003.safetensors" for n in (1, 2) if str(n) not in where[:12])
    rewrite_index(tmp_path, name, other)
    assert f"disagree about tensor '{name}'" in refusal(tmp_path)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(tmp_path)


def test_an_index_that_lists_a_tensor_twice_over_two_files_is_refused(tmp_path: Path) -> None:
    tensors = write_shards(tmp_path)
    name = "model.embedding_norm.weight"
    where = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    other = next(file for file in set(where.values()) if file != where[name])
    held = {n: t for n, t in tensors.items() if where[n] == other}
    save_file({**held, name: tensors[name]}, tmp_path / other)
    assert f"'{name}'" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["../evil.safetensors", "/etc/passwd", "sub/evil.safetensors", "evil.bin", "..", ""])
def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "model"
    tensors = write_shards(folder)
    name = "model.embedding_norm.weight"
    save_file({name: tensors[name]}, tmp_path / "evil.safetensors")
    rewrite_index(folder, name, file)
    assert "not a safetensors file of this folder" in refusal(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": []}', "\x00"])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).write_text(content)
    assert INDEX in refusal(tmp_path)


def test_random_weights_are_the_same_in_every_run_and_differ_by_seed() -> None:
    def one(seed: int) -> Tensor:
        return RandomTensors(torch.float32, CPU, seed).take("model.embed_tokens.weight", (20, 8))

    assert torch.equal(one(0), one(0))
    assert not torch.equal(one(0), one(1))


def test_rotary_angles_do_not_depend_on_how_many_positions_were_needed() -> None:
    one, other = tiny_model(), tiny_model()
    far = one.rotary.upto(4000)[0]
    near = other.rotary.upto(3)[0].clone()
    assert torch.equal(far[:, : near.shape[1]], near)
    assert torch.equal(other.rotary.upto(4000)[0][:, :4000], far[:, :4000])


def test_a_shorter_table_outlives_a_longer_one_for_launches_that_were_recorded_with_it() -> None:
    rotary = tiny_model().rotary
    shorter = weakref.ref(rotary.upto(3)[0])
    assert rotary.upto(4000)[0] is not shorter() is not None


def test_engines_in_several_threads_get_no_rotary_table_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, lengths = tiny_model().rotary, []
    make = rotary._table

    def meanwhile(*arguments: Any) -> Tensor:
        monkeypatch.setattr(rotary, "_table", make)
        lengths.append(rotary.upto(5)[0].shape[1])  # as another thread asks
        return make(*arguments)

    monkeypatch.setattr(rotary, "_table", meanwhile)
    assert rotary.upto(7)[0].shape[1] >= 7
    assert lengths[0] >= 5


def test_dtype_and_device_are_checked_by_name() -> None:
    config = parse_config(raw_config(torch_dtype="bfloat16"), "tiny")
    assert resolve_dtype("auto", config, torch.device("meta")) == torch.bfloat16
    assert resolve_dtype("auto", config, CPU) in (torch.bfloat16, torch.float32)
    assert resolve_dtype("float16", config, torch.device("meta")) == torch.float16
    with pytest.raises(ModelError, match=r"float16.*may exceed its range"):
        resolve_dtype("float16", replace(config, embedding_scale=2.0), torch.device("meta"))
    with pytest.raises(ModelError, match=r"float16.*a CPU has no kernels for it; use auto"):
        resolve_dtype("float16", config, CPU)
    with pytest.raises(ModelError, match=r"'int8'.*bfloat16, float16, float32"):
        resolve_dtype("int8", config, CPU)
    with pytest.raises(ModelError, match="float64"):
        resolve_dtype("auto", parse_config(raw_config(torch_dtype="float64"), "tiny"), torch.device("meta"))
    assert resolve_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert resolve_device("auto") == CPU
        with pytest.raises(ModelError, match="--device cpu"):
            resolve_device("cuda")
    with pytest.raises(ModelError, match="'tpu'"):
        resolve_device("tpu")


def test_a_cuda_device_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ModelError, match=r"'cuda:2': the last CUDA device .* is cuda:1"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_cuda_device_has_an_index(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device(name) == torch.device("cuda", 1)


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        load_config(str(tmp_path / "nowhere"))
