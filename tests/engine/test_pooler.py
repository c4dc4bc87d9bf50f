"""Vectors are those of the reference, and no bit of one depends on what else is computed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import raw_config
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_kernels import ReferenceKernels
from safetensors.torch import load_file, save_file
from tiny_model import spoil
from vector_models import bidirectional_states, loaded, saved, vectors

from batchgen.core.errors import ModelError
from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.pooler import Pooler
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import RequestState
from batchgen.model.decoder import Decoder
from batchgen.model.registry import parse_config
from batchgen.model.vector_files import Dense
from batchgen.model.vectors import VectorHead, VectorSettings

KINDS = {"lfm2": "Lfm2BidirectionalModel", "qwen3": "Qwen3Model", "llama": "LlamaModel"}
POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda states: states[:1],
    "last": lambda states: states[-1:],
    "mean": lambda states: states.mean(0, keepdim=True),
    "tokens": lambda states: states,
}


@cache
def checkpoint(kind: str) -> tuple[Any, Path]:
    folder = Path(mkdtemp(prefix="batchgen-"))
    return saved(folder, kind, KINDS[kind]), folder


@cache
def model(kind: str, **settings: Any) -> Decoder:
    return loaded(checkpoint(kind)[1], **settings)


@cache
def texts() -> dict[int, list[int]]:
    rng = random.Random(0)
    lengths = [1, 2, 3, 15, 16, 17, 32, 33, 255, 256, 257, 300]
    return {key: [rng.randrange(8, 128) for _ in range(length)] for key, length in enumerate(lengths)}


def states(kind: str, token_ids: list[int]) -> torch.Tensor:
    reference = checkpoint(kind)[0]
    if kind == "lfm2":
        return bidirectional_states(reference, token_ids)
    with torch.no_grad():
        found: torch.Tensor = reference(torch.tensor([token_ids])).last_hidden_state[0]
    return found


def pooled(kind: str, pooling: str) -> Callable[[list[int]], torch.Tensor]:
    """The reference's states of a text, pooled."""
    return lambda token_ids: POOLED[pooling](states(kind, token_ids))


def assert_vectors(
    found: dict[int, bytes], wanted: Callable[[list[int]], torch.Tensor], *, relative: bool = False
) -> None:
    """The vector of each text is nearly that of the reference."""
    for key, token_ids in texts().items():
        with torch.no_grad():
            expected = wanted(token_ids).numpy().ravel()
        got = np.frombuffer(found[key], np.float32)
        assert got.shape == expected.shape
        assert abs(got - expected).max() <= 1e-5 * max(1, abs(expected).max())


def normalized(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_the_references(kind: str, pooling: str) -> None:
    wanted = pooled(kind, pooling)
    assert_vectors(vectors(model(kind), texts(), pooling), lambda text: normalized(wanted(text)))


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("pooling", ["cls", "tokens"])
def test_dense_layers_follow_pooling_and_come_before_cut_and_norm(
    pooling: str, is_normalized: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    layers, dense = [torch.nn.Linear(64, 48), torch.nn.Linear(48, 32, bias=False)], []
    for name, layer in zip("ab", layers, strict=True):
        folder = tmp_path / name
        folder.mkdir()
        save_file({f"linear.{key}": value for key, value in layer.state_dict().items()}, folder / "model.safetensors")
        has_bias = layer.bias is not None
        dense.append(Dense(folder, layer.in_features, layer.out_features, has_bias, has_tanh=has_bias))
    asked = VectorSettings(tuple(dense), normalize=is_normalized, dimensions=20)
    states_of, norm = pooled("lfm2", pooling), normalized if is_normalized else torch.Tensor.contiguous
    found = vectors(model("lfm2"), texts(), pooling, asked)
    assert_vectors(found, lambda text: norm(layers[1](layers[0](states_of(text)).tanh())[:, :20]))


@pytest.mark.parametrize("pooling", POOLED)
def test_without_a_module_for_it_vectors_keep_their_length(pooling: str) -> None:
    found = vectors(model("qwen3"), texts(), pooling, VectorSettings())
    assert_vectors(found, pooled("qwen3", pooling))


def test_reference_kernels_agree() -> None:
    decoder = loaded(checkpoint("lfm2")[1], kernels=ReferenceKernels(torch.device("cpu"), torch.float32))
    wanted = pooled("lfm2", "mean")
    assert_vectors(vectors(decoder, texts(), "mean"), lambda text: normalized(wanted(text)))


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_in_bfloat16_and_integers_point_the_same_way(kind: str) -> None:
    exact = vectors(model(kind), texts(), "mean")
    for form, least in (({"dtype": "bfloat16"}, 0.9995), ({"quantization": "w8a16"}, 0.999)):
        found = vectors(loaded(checkpoint(kind)[1], **form), texts(), "mean")
        cosines = [np.dot(*(np.frombuffer(of[key], np.float32) for of in (exact, found))) for key in texts()]
        assert min(cosines) >= least, (form, min(cosines))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90) | st.sampled_from([1, 255, 256, 257, 300]), min_size=1, max_size=12),
    budget=st.integers(1, 128) | st.just(4096),
    block_size=st.sampled_from([1, 5, 16, 32]),
    max_num_seqs=st.sampled_from([1, 2, 7]),
    pooling=st.sampled_from([*POOLED]),
    kind=st.sampled_from(["lfm2", "qwen3"]),
    form=st.sampled_from([{}, {"dtype": "bfloat16"}, {"quantization": "w8a16"}]),
    threads=st.sampled_from([1, 2]),
)
def test_no_bit_depends_on_the_batch_or_on_sizes(
    lengths: list[int],
    pooling: str,
    kind: str,
    form: tuple[tuple[str, str], ...],
    threads: int,
    budget: int,
    **sizes: int,
) -> None:
    rng = random.Random(sum(lengths))
    stem = [rng.randrange(8, 128) for _ in range(40)]  # so that causal models find cached blocks
    some = {
        key: (stem * (n > 20) + [rng.randrange(8, 128) for _ in range(n)])[-n - 20 :] for key, n in enumerate(lengths)
    }
    decoder = model(kind, **dict(form))
    torch.set_num_threads(1)
    alone = {key: vectors(decoder, {key: text}, pooling, prefix_caching=False)[key] for key, text in some.items()}
    torch.set_num_threads(threads)
    assert vectors(decoder, some, pooling, threads=threads, max_num_batched_tokens=budget, **sizes) == alone
    torch.set_num_threads(1)


def test_equal_texts_that_are_pooled_otherwise_share_nothing() -> None:
    head = VectorHead(VectorSettings(), model("qwen3").kernels, model("qwen3").config.hidden_size, torch.float32)
    engine = Engine(model("qwen3"), EngineConfig(kv_cache_memory=1 << 26), sampler=partial(Pooler, head))
    params = SamplingParams(max_tokens=0)
    requests = [Request(key, (9, 10, 11), params, pooling=key) for key in ("last", "mean")]
    for result in engine.run(requests):
        assert result.vector == vectors(model("qwen3"), {0: [9, 10, 11]}, result.key, VectorSettings())[0]


def test_a_long_text_is_computed_in_one_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, steps = Scheduler.schedule, []

    def noted(self: Scheduler) -> Any:
        found = schedule(self)
        steps.append(found.counts)
        return found

    monkeypatch.setattr(Scheduler, "schedule", noted)
    vectors(model("lfm2"), texts(), "cls", max_num_batched_tokens=64)
    assert sorted(count for step in steps for count in step) == sorted(map(len, texts().values()))
    assert all(sum(step) <= 64 or len(step) == 1 for step in steps)


@pytest.mark.parametrize(("kind", "labels"), [("qwen3", 5), ("llama", 3), ("llama", 1)])
def test_classifiers_are_transformers(kind: str, labels: int, tmp_path: Path) -> None:
    name = {"qwen3": "Qwen3", "llama": "Llama"}[kind] + "ForSequenceClassification"
    reference = saved(tmp_path, kind, name, id2label={str(i): f"l{i}" for i in range(labels)}, num_labels=labels)
    decoder = loaded(tmp_path)
    assert decoder.config.labels == tuple(f"l{i}" for i in range(labels))
    scores = "softmax" if labels > 1 else "sigmoid"
    found = vectors(decoder, texts(), "last", VectorSettings(scores=scores))
    function = partial(torch.softmax, dim=-1) if labels > 1 else torch.sigmoid
    assert_vectors(found, lambda text: function(reference(torch.tensor([text])).logits[0]))


OLDER = "sbert_ce_default_activation_function"
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        *((problem, n) for problem in (None, "regression", "multi_label_classification") for n in (1, 3)),
        ("single_label_classification", 3),
    ],
)
def test_scores_are_those_of_the_pipeline_of_transformers(problem: str | None, labels: int) -> None:
    from transformers.pipelines.text_classification import TextClassificationPipeline

    raw = raw_config("llama", architectures=["LlamaForSequenceClassification"], num_labels=labels, problem_type=problem)
    logits = np.array([[0.5, -1.0, 2.0][:labels]], np.float32)
    pipeline = object.__new__(TextClassificationPipeline)
    pipeline.model = SimpleNamespace(config=SimpleNamespace(problem_type=problem, num_labels=labels, id2label=range(3)))
    wanted = pipeline.postprocess({"logits": torch.from_numpy(logits)}, None, top_k=None, _legacy=False)
    found = VectorHead(
        VectorSettings(scores=parse_config(raw, "").scores), model("llama").kernels, labels, torch.float32
    )
    assert sorted(found(logits)[0].tolist()) == pytest.approx(sorted(item["score"] for item in wanted))


@pytest.mark.parametrize(("function", "wanted"), [(SIGMOID, "sigmoid"), (IDENTITY, "logits"), ("", "softmax")])
def test_a_function_of_sentence_transformers_makes_the_scores(function: str, wanted: str) -> None:
    raw = raw_config("llama", architectures=["LlamaForSequenceClassification"], num_labels=3)
    for change in ({"sentence_transformers": {"activation_fn": function}}, {OLDER: function}):
        assert parse_config(raw | change, "config.json").scores == wanted


@pytest.mark.parametrize("change", [{"problem_type": "ranking"}, {OLDER: "mine.Tanh"}])
def test_a_kind_of_scores_that_is_not_known_is_refused(change: dict[str, str]) -> None:
    raw = raw_config("llama", architectures=["LlamaForSequenceClassification"], num_labels=3)
    with pytest.raises(ModelError, match="; known are '"):
        parse_config(raw | change, "config.json")


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_classifier_over_a_bidirectional_trunk(pooling: str, tmp_path: Path) -> None:
    architecture, labels = "Lfm2BidirectionalForSequenceClassification", {"0": "a", "1": "b", "2": "c"}
    reference = saved(tmp_path, "lfm2", "Lfm2BidirectionalModel", id2label=labels)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}), encoding="utf-8")
    file = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    scores = torch.randn(3, 64) / 4
    save_file({**load_file(file), "score.weight": scores}, file, {"format": "pt"})
    found = vectors(loaded(tmp_path), texts(), pooling, VectorSettings(scores="softmax"))
    assert_vectors(found, lambda text: (POOLED[pooling](bidirectional_states(reference, text)) @ scores.T).softmax(-1))


def test_the_mean_of_a_single_label_does_not_depend_on_sizes(tmp_path: Path) -> None:
    saved(tmp_path, "llama", "LlamaForSequenceClassification", id2label={"0": "l0"}, num_labels=1)
    decoder = loaded(tmp_path)
    whole, parts = (vectors(decoder, texts(), "mean", VectorSettings(), max_num_batched_tokens=n) for n in (4096, 17))
    assert whole == parts


def test_extreme_logits_are_certain_scores_and_infinite_ones_fail_their_row() -> None:
    head = VectorHead(VectorSettings(scores="sigmoid"), model("llama").kernels, 2, torch.float32)
    assert head(np.array([[-1000, 1000]], np.float32)).tolist() == [[0, 1]]
    request = Request(0, (9,), SamplingParams(max_tokens=0), pooling="last")
    sequence = RequestState(request).sequences[0]
    Pooler(head, model("llama").kernels, frozenset()).score(torch.tensor([[1, torch.inf]]), [(sequence, range(1, 2))])
    assert sequence.generation.error is not None


def test_states_that_are_not_finite_fail_their_row_alone() -> None:
    decoder = loaded(checkpoint("lfm2")[1])
    spoil(decoder, 100, float("nan"))
    head = VectorHead(VectorSettings(), decoder.kernels, 64, torch.float32)
    engine = Engine(decoder, EngineConfig(kv_cache_memory=1 << 24), sampler=partial(Pooler, head))
    rows = [Request(key, ids, SamplingParams(max_tokens=0), pooling="mean") for key, ids in enumerate([(9,), (9, 100)])]
    results = {result.key: result for result in engine.run(rows)}
    assert results[0].error is None
    assert results[1].error is not None
    assert "not finite" in results[1].error.message
