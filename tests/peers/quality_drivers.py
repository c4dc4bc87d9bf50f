"""Drivers of engines for ``quality.py``: how likely each finds given answers, and what it answers itself.

``python quality_drivers.py PEER --model DIR --workload FILE [--max-tokens N] [--dtype TYPE]``. Rows have
``prompt_token_ids`` and ``answer_token_ids``. Each driver prints one JSON line and needs nothing but its engine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drivers import model_settings

Row = dict[str, list[int]]
Found = tuple[str, list[float], list[list[int]]]  # the version, log-probabilities of given answers, own answers


def batchgen(given: argparse.Namespace, rows: list[Row]) -> Found:
    """The engine alone, in a format of ``model_settings``."""
    from batchgen.config.job import ModelSpec
    from batchgen.core.records import Request, SamplingParams
    from batchgen.core.version import __version__
    from batchgen.engine import Engine, EngineConfig
    from batchgen.engine.load import load_weights

    model = load_weights(ModelSpec(path=given.model, **model_settings(given.dtype)))
    scored = SamplingParams(labels=("the answer",))
    greedy = SamplingParams(max_tokens=given.max_tokens)
    requests = []
    for key, row in enumerate(rows):
        prompt = tuple(row["prompt_token_ids"])
        requests.append(Request(2 * key, prompt, scored, labels=(tuple(row["answer_token_ids"]),)))
        requests.append(Request(2 * key + 1, prompt, greedy))
    results = {r.key: r for r in Engine(model, EngineConfig(), eos_token_ids=given.ends).run(requests)}
    numbers = range(len(rows))
    answers = [list(results[2 * key + 1].first.token_ids) for key in numbers]
    return f"{__version__} {model.numerics['dtype']}", [results[2 * key].label_logprobs[0] for key in numbers], answers


def _scored_by(model: Any, torch: Any, rows: list[Row]) -> Iterator[float]:
    """The log-probability of each row's answer by a model of transformers, or one that is called like it."""
    for row in rows:
        prompt, answer = row["prompt_token_ids"], row["answer_token_ids"]
        ids = torch.tensor([prompt + answer])
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1]
        picked = logits.double().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
        yield float(picked.sum())


def _without_end(answer: list[int], ends: list[int]) -> list[int]:
    """The tokens before the first end token."""
    return answer[: min((place for place, token in enumerate(answer) if token in ends), default=len(answer))]


def transformers(given: argparse.Namespace, rows: list[Row]) -> Found:
    """A model of transformers, one row after the other where texts are scored."""
    torch, module = map(importlib.import_module, ("torch", "transformers"))
    model = module.AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()
    logprobs = list(_scored_by(model, torch, rows))
    settings = {"do_sample": False, "max_new_tokens": given.max_tokens, "eos_token_id": given.ends, "pad_token_id": 0}
    answers = []
    for row in rows:
        ids = torch.tensor([row["prompt_token_ids"]])
        with torch.inference_mode():
            out = model.generate(ids, generation_config=module.GenerationConfig(**settings))
        answers.append(out[0, ids.shape[1] :].tolist())
    return str(module.__version__), logprobs, answers


def openvino(given: argparse.Namespace, rows: list[Row]) -> Found:
    """Texts are scored by optimum's model of the exported folder, and answered by the pipeline that is timed."""
    torch, optimum, genai, tensors, numpy = map(
        importlib.import_module, ("torch", "optimum.intel", "openvino_genai", "openvino", "numpy")
    )
    model = optimum.OVModelForCausalLM.from_pretrained(given.model, device="CPU", use_cache=True)
    logprobs = list(_scored_by(model, torch, rows))
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size = 256, 4
    engine = genai.ContinuousBatchingPipeline(given.model, scheduler, "CPU", {})
    params = genai.GenerationConfig()
    params.max_new_tokens, params.do_sample, params.stop_token_ids = given.max_tokens, False, set(given.ends)
    prompts = [tensors.Tensor(numpy.asarray([row["prompt_token_ids"]], dtype=numpy.int64)) for row in rows]
    answers = [list(found.m_generation_ids[0]) for found in engine.generate(prompts, [params] * len(rows))]
    return str(genai.__version__), logprobs, answers


def main(peers: dict[str, Callable[[argparse.Namespace, list[Row]], Found]]) -> None:
    """Run one engine once and print what it found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=peers)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--ends", default=[], type=lambda text: [int(token) for token in text.split(",")])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.workload.read_text().splitlines()]
    version, logprobs, answers = peers[given.peer](given, rows)
    own = [_without_end(answer, given.ends) for answer in answers]
    found = {
        "peer": given.peer,
        "version": version,
        "dtype": given.dtype,
        "num_tokens": [len(row["answer_token_ids"]) for row in rows],
        "logprobs": logprobs,
        "max_tokens": given.max_tokens,
        "answers": own,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main({each.__name__: each for each in (batchgen, transformers, openvino)})
