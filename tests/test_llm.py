"""A loaded model answers as a run does, in lists and tables, in several threads, and after whatever ended a call."""

from __future__ import annotations

import copy
import inspect
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_helpers import ENVIRONMENT, MODEL
from stub_engine import StubEngine, stub_factory

import batchgen
from batchgen.config.load import sections_of
from batchgen.core.errors import UsageError

SAMPLED = {"max_tokens": 12, "temperature": 0.8, "seed": 3}
# The arguments of vllm.LLM's methods that are here too, in vllm's order (0.10 and later).
OF_VLLM = {
    "generate": ["prompts", "sampling_params", "use_tqdm"],
    "chat": ["messages", "sampling_params", "use_tqdm", "continue_final_message", "tools", "chat_template_kwargs"],
    "embed": ["prompts", "use_tqdm"],
    "classify": ["prompts", "use_tqdm"],
}
OWN = {"self", "sampling", "labels"}


def llm(engines: list[StubEngine] | None = None, stub: dict[str, Any] | None = None, **keys: Any) -> batchgen.LLM:
    given = {"model": MODEL, "prompt": "{question}", "sampling": SAMPLED, **keys}
    return batchgen.LLM(**given, engine_factory=stub_factory(engines, **(stub or {})))


def question(number: int) -> str | None:
    return {5: "", 11: None}.get(number, f"What is {number} and {number % 7}?")


ROWS = [{"row": number, "question": question(number)} for number in range(40)]


def without_timings(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    left_out = {"timings", "row", "question", "prompt", "messages"}
    return [{name: value for name, value in record.items() if name not in left_out} for record in records]


@pytest.mark.parametrize("method", OF_VLLM)
def test_the_arguments_are_those_of_vllm(method: str) -> None:
    own = [name for name in inspect.signature(getattr(batchgen.LLM, method)).parameters if name not in OWN]
    assert own == OF_VLLM[method]


def test_prompts_and_chats_get_the_records_of_a_run() -> None:
    texts = [f"Say {number}" for number in range(9)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    params = batchgen.SamplingParams(max_tokens=9, temperature=0.5, stop=("x",))
    factory = stub_factory()
    with batchgen.LLM(MODEL, engine_factory=factory) as model:
        of_texts, of_chats = model.generate(texts, params), model.chat(chats, params)
        assert without_timings(model.chat(chats[3], params, temperature=0)) != without_timings(of_chats[3:4])
        assert model.generate(texts[0], max_tokens=9)[0]["usage"] != of_chats[0]["usage"]
    run = batchgen.generate(texts, MODEL, sampling=params, input={"chat_template": "none"}, engine_factory=factory)
    assert without_timings(of_texts) == without_timings(run.rows)
    run = batchgen.generate(chats, MODEL, sampling=params, engine_factory=factory)
    assert without_timings(of_chats) == without_timings(run.rows)


@pytest.mark.parametrize(
    "keys", [{"prompt": "q"}, {"messages": "m"}, {"prompt_token_ids": "ids"}, {"prompt": None, "system": "S"}]
)
def test_strings_are_prompts_and_chats_are_chats_wherever_tables_have_them(keys: dict[str, Any]) -> None:
    texts = ["one", "two"]
    wanted = without_timings(llm(prompt=None).generate(texts))
    model = llm(**{"prompt": None, **keys})
    pandas = pytest.importorskip("pandas")
    for prompts in (texts, np.array(texts), pandas.Series(texts), iter(texts), [texts[0], {"prompt": texts[1]}]):
        assert without_timings(model.generate(prompts)) == wanted
    assert len(model.chat([{"role": "user", "content": "one"}])[0]["text"]) > 0


def test_sampling_params_replace_the_models_own_and_keywords_go_over_them() -> None:
    model, sampling_params = llm(prompt=None), batchgen.SamplingParams(max_tokens=9, temperature=0.8)
    greedy = without_timings(llm(prompt=None, sampling={}).generate("a", max_tokens=5))
    assert without_timings(model.generate("a", batchgen.SamplingParams(max_tokens=5))) == greedy
    assert without_timings(model.generate("a", sampling_params, max_tokens=5, temperature=0)) == greedy
    assert without_timings(model.generate("a", max_tokens=5)) != greedy


def test_a_row_that_cannot_run_has_its_error_in_its_place() -> None:
    with pytest.warns(UserWarning, match="1 of 3 rows failed"):
        records = llm(prompt=None).generate(["a", "", "b"])
    assert [record.get("code") for record in records] == [None, "empty_prompt", None]


@given(cuts=st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=10, deadline=None)
def test_any_cut_into_batches_gives_what_a_run_gives(cuts: list[int]) -> None:
    model = llm(id="row")
    with pytest.warns(UserWarning, match="2 of 40 rows failed"):
        run = batchgen.generate(
            ROWS, MODEL, "{question}", sampling=SAMPLED, input={"id": "row"}, engine_factory=stub_factory()
        )
    wanted = {record["index"]: record["text"] for record in run.rows}
    wanted |= {error["index"]: f"{error['code']}: {error['message']}" for error in run.errors}
    table, found = pa.Table.from_pylist(ROWS), []
    for low, high in pairwise([0, *sorted(cuts), 40]):
        found += model(table.slice(low, high - low)).to_pylist()
    assert [row["row"] for row in found] == [*range(40)]
    assert {row["row"]: row["text"] if row["error"] is None else row["error"] for row in found} == wanted


@pytest.mark.parametrize("kind", ["table", "batch", "pandas", "numpy"])
def test_tables_of_each_kind_are_taken_and_keep_their_columns(kind: str) -> None:
    table = pa.table({"text": ["own", "own"], "question": ["a", "b"]})
    batch: Any = {
        "table": lambda: table,
        "batch": lambda: table.to_batches()[0],
        "pandas": table.to_pandas,
        "numpy": lambda: {name: np.array(table[name].to_pylist()) for name in table.column_names},
    }
    found = llm(sampling={"max_tokens": 3})(batch[kind]())
    assert found.column_names[:5] == ["input_text", "question", "text", "finish_reason", "usage"]
    assert found["input_text"].to_pylist() == ["own", "own"]
    assert (found["error"].to_pylist(), found.column_names[-1]) == ([None, None], "error")
    assert llm(sampling={"max_tokens": 3})(table.slice(0, 0)).schema.names == found.schema.names


def test_random_draws_of_a_table_need_an_id() -> None:
    found = llm()(pa.Table.from_pylist(ROWS[:2]))
    assert [error.partition(":")[0] for error in found["error"].to_pylist()] == ["bad_param"] * 2


def test_labels_are_scored() -> None:
    records = llm().classify(["Is it?", "Is it not?"], ["yes", "no"])
    assert {record["label"] for record in records} <= {"yes", "no"}
    assert [record["scores"].keys() for record in records] == [{"yes", "no"}] * 2
    assert without_timings(llm().classify(["Is it?"], np.array(["yes", "no"]))) == without_timings(records[:1])
    with pytest.raises(UsageError, match="has no labels of its own"):
        llm().classify(["Is it?"])
    by_default = llm(labels=["yes", "no"]).classify(["Is it?"])
    assert without_timings(by_default) == without_timings(records[:1])


def test_texts_become_an_array() -> None:
    with batchgen.LLM(MODEL, pooling="mean") as model:
        vectors = model.embed(["one", "two", "three"])
        assert (vectors.shape, vectors.dtype) == ((3, model._model.config.hidden_size), np.float32)
        assert np.array_equal(vectors[1:2], model.embed("two"))
        assert model.embed([]).shape == (0, vectors.shape[1])
        with pytest.raises(UsageError, match=r"prompts\[1\]: empty_prompt"):
            model.embed(["a", ""])
        with pytest.raises(UsageError, match="use embed or classify"):
            model.generate("a")
    with pytest.raises(UsageError, match='give pooling="mean"'):
        llm().embed(["a"])


def test_calls_of_two_threads_get_what_each_gets_alone() -> None:
    engines: list[StubEngine] = []
    model = llm(engines, prompt=None)
    texts = [[f"{name} {number}" for number in range(30)] for name in ("one", "two")]
    alone = [without_timings(model.generate(each)) for each in texts]
    found: list[Any] = [None, None]

    def call(place: int) -> None:
        found[place] = without_timings(model.generate(texts[place]))

    threads = [threading.Thread(target=call, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (found, len(engines)) == (alone, 1)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_ends_a_call_ends_no_other(error: type[BaseException]) -> None:
    engines: list[StubEngine] = []

    def end(step: int) -> None:
        if len(engines) == 1 and step == 2:
            raise signal.raise_signal(signal.SIGINT) if error is KeyboardInterrupt else error("out of luck")

    model = llm(engines, {"before_step": end}, prompt=None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error):
            model.generate(["a", "b", "c"] * 9)
    finally:
        signal.signal(signal.SIGINT, before)
    assert without_timings(model.generate(["a", "b"])) == without_timings(llm(prompt=None).generate(["a", "b"]))
    assert len(engines) == 2


def test_a_closed_model_says_so_and_is_closed_by_with() -> None:
    closed: list[int] = []

    def factory(*given: Any) -> Any:
        return replace(stub_factory()(*given), close=lambda: closed.append(1))

    with batchgen.LLM(MODEL, engine_factory=factory) as model:
        assert closed == []
    assert (closed, repr(model)) == ([1], f"<LLM: {MODEL}, closed>")
    with pytest.raises(UsageError, match="it was closed"):
        model.generate("a")


def test_dtype_is_the_models_though_embeddings_have_one_too() -> None:
    assert sections_of({"dtype": "float32"}, "LLM") == {"model": {"dtype": "float32"}}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: llm(thread=2), "unknown argument 'thread'.*threads"),
        (
            lambda: llm(n_gpu_layers=99),
            r"unknown argument 'n_gpu_layers' \(--device cuda [^()]*; see batchgen help GPUs\)$",
        ),
        (lambda: llm(wholly=1), r"unknown argument 'wholly' \(its keys: batchgen help job-file\)$"),
        (lambda: llm(gpu_memory_utilization=0.9), "gpu_memory_utilization"),
        (lambda: llm(format="csv"), "a key of several sections.*input=.*output="),
        (lambda: llm(sampling={"max_tokens": -1}), "max_tokens = -1"),
        (lambda: llm().generate("a", max_new_tokens=5), "max_new_tokens.*max_tokens"),
        (lambda: llm().generate("a", {"max_tokens": 5}), "of type dict, not SamplingParams"),
        (lambda: llm().chat("hi"), "messages is a string"),
        (lambda: llm().classify(["a"], "yes"), r"give a list, \['yes', ...\]"),
        (lambda: llm()([1]), "the batch is of type list"),
        (lambda: llm().generate([1]), r"rows\[0\] is of type int"),
        (
            lambda: llm(limit=1, expected="gold"),
            "input.limit, eval.expected are keys of jobs: batchgen.generate takes them",
        ),
        (lambda: llm(limit=1), "input.limit is a key of jobs"),
        (lambda: llm(workers=2), "cluster.workers is a key of jobs"),
        (lambda: llm(output="runs/a"), "output.path is a key of jobs"),
        (lambda: llm(expected="gold"), "eval.expected is a key of jobs"),
        (lambda: llm().chat(5), "messages is of type int, not a chat"),
        (lambda: llm()({"prompt": ["a", "b"], "z": [1]}), "the batch is not a table"),
        (lambda: pickle.dumps(llm()), "cannot be copied or pickled"),
        (lambda: copy.deepcopy(llm()), "cannot be copied or pickled"),
        (lambda: llm(swap_space=4, gpu_memory_utilization=0.9), "arguments 'swap_space'.*'gpu_memory_utilization'"),
        (lambda: llm(tensor_parallel_size=2), r"workers, which batchgen\.generate takes"),
        (lambda: llm(model_path="x"), r"unknown argument 'model_path' \(here it is model\)"),
        (lambda: llm().generate("a", lora_request=1), "lora_request"),
        (lambda: batchgen.LLM("dummy:LFM2-350M"), "no tokenizer"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_arguments_of_vllm_that_ask_for_what_happens_anyway_are_taken() -> None:
    flags = {"enforce_eager": True, "enable_prefix_caching": True, "trust_remote_code": False}
    assert len(llm(tensor_parallel_size=1, **flags).chat(iter([{"role": "user", "content": "Hi"}]))) == 1


def test_a_value_whose_text_raises_costs_its_row() -> None:
    class Broken:
        def __str__(self) -> str:
            raise KeyError("no text")

    with pytest.warns(UserWarning, match="1 of 2 rows failed"):
        records = llm().generate([{"prompt": "a"}, {"prompt": "b", "more": Broken()}])
    assert [record.get("code") for record in records] == [None, "bad_json"]


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, batchgen; batchgen.LLM; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=ENVIRONMENT).returncode == 0
