"""Drivers of engines: each runs one workload once, in an environment of its own, and prints one JSON line.

``python drivers.py PEER --model DIR --workload FILE [--max-tokens N] [--max-num-seqs N] [--dtype TYPE]``. Rows have
``prompt_token_ids``; all have the same ``max_tokens`` and the model's own end tokens, so that no engine knows how long
an answer will be. It needs nothing but the engine that it drives.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Generate = Callable[[], Iterator[int]]  # the number of generated tokens of each row, in any order


def model_settings(form: str) -> dict[str, Any]:
    """Batchgen's settings for a format: a dtype, or a way to quantize with its dtype behind it, as "w8a8-float32"."""
    quantization, _, dtype = form.partition("-") if form.startswith("w8") else ("none", "", form)
    return {"quantization": quantization, "dtype": dtype or "auto"}


def batchgen(given: argparse.Namespace, prompts: list[list[int]]) -> tuple[str, Generate]:
    """The engine alone, without files; nothing is known of lengths, so rows are admitted in order of arrival.

    Formats are those of ``model_settings``; with "-kv-int8" behind one keys and values are kept in 8 bits too, as
    OpenVINO does unasked.
    """
    from batchgen.config.job import ModelSpec
    from batchgen.core.records import Request, SamplingParams
    from batchgen.core.version import __version__
    from batchgen.engine import Engine, EngineConfig
    from batchgen.engine.load import load_weights

    form = given.dtype.removesuffix("-kv-int8")
    model = load_weights(ModelSpec(path=given.model, **model_settings(form)))
    kv_cache_dtype = "auto" if form == given.dtype else "int8"
    config = EngineConfig(max_num_seqs=given.max_num_seqs, longest_first=False, kv_cache_dtype=kv_cache_dtype)
    engine = Engine(model, config, eos_token_ids=given.ends)
    params = SamplingParams(max_tokens=given.max_tokens)
    requests = [Request(key, tuple(prompt), params) for key, prompt in enumerate(prompts)]
    return __version__, lambda: (len(result.first.token_ids) for result in engine.run(requests))


def vllm(given: argparse.Namespace, prompts: list[list[int]]) -> tuple[str, Generate]:
    """``LLM.generate``; on a CPU without compilation, which is faster to start and was not slower."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")  # else it leaves one idle
    module = importlib.import_module("vllm")
    longest = max(map(len, prompts)) + given.max_tokens
    engine = module.LLM(
        model=given.model,
        dtype=given.dtype,
        max_num_seqs=given.max_num_seqs,
        max_model_len=longest,
        enforce_eager=True,
        disable_log_stats=True,
    )
    params = module.SamplingParams(
        temperature=0.0, max_tokens=given.max_tokens, stop_token_ids=given.ends, detokenize=False
    )
    rows = [{"prompt_token_ids": prompt} for prompt in prompts]

    def generate() -> Iterator[int]:
        answers = engine.generate(rows, params, use_tqdm=False)
        return (len(answer.outputs[0].token_ids) for answer in answers)

    return str(module.__version__), generate


def openvino(given: argparse.Namespace, prompts: list[list[int]]) -> tuple[str, Generate]:
    """``ContinuousBatchingPipeline``; ``--model`` is a folder that optimum-cli has exported."""
    genai, tensors, numpy = map(importlib.import_module, ("openvino_genai", "openvino", "numpy"))
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size = given.max_num_seqs, 4
    precision = {"bfloat16": "bf16", "float32": "f32"}.get(given.dtype)
    properties = {"INFERENCE_PRECISION_HINT": precision} if precision else {}
    engine = genai.ContinuousBatchingPipeline(given.model, scheduler, "CPU", properties)
    params = genai.GenerationConfig()
    params.max_new_tokens, params.do_sample, params.stop_token_ids = given.max_tokens, False, set(given.ends)
    rows = [tensors.Tensor(numpy.asarray([prompt], dtype=numpy.int64)) for prompt in prompts]

    def generate() -> Iterator[int]:
        answers = engine.generate(rows, [params] * len(rows))
        return (len(answer.m_generation_ids[0]) for answer in answers)

    return str(genai.__version__), generate


def llama_cpp(given: argparse.Namespace, prompts: list[list[int]]) -> tuple[str, Generate]:
    """``llama_decode`` on batches as its server forms them: a token of each row that runs, and prompts that fit beside.

    ``--model`` is a GGUF file. ``--batch`` rows run at once; the memory of keys and values is one for all rows.
    """
    module, numpy = map(importlib.import_module, ("llama_cpp", "numpy"))
    module.llama_backend_init()
    model = module.llama_model_load_from_file(given.model.encode(), module.llama_model_default_params())
    most = 512
    settings = module.llama_context_default_params()
    settings.n_ctx = given.batch * (max(map(len, prompts)) + given.max_tokens)
    settings.n_batch = settings.n_ubatch = most
    settings.n_seq_max, settings.kv_unified = given.batch, True
    settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
    context = module.llama_init_from_model(model, settings)
    memory = module.llama_get_memory(context)
    vocab_size = module.llama_vocab_n_tokens(module.llama_model_get_vocab(model))
    batch = module.llama_batch_init(most, 0, 1)

    def generate() -> Iterator[int]:
        waiting, free = list(reversed(prompts)), list(range(given.batch))
        running: dict[int, tuple[list[int], int, int]] = {}  # by slot: tokens to compute, how many before, generated
        while waiting or running:
            while waiting and free:
                running[free.pop()] = (waiting.pop(), 0, 0)
            batch.n_tokens = 0
            last: dict[int, int] = {}
            for slot, (tokens, place, count) in sorted(running.items(), key=lambda item: item[1][2] == 0):
                part = tokens[: most - batch.n_tokens]
                for offset, token in enumerate(part):
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, place + offset, 1
                    batch.seq_id[at][0], batch.logits[at] = slot, offset == len(tokens) - 1
                    batch.n_tokens += 1
                running[slot] = (tokens[len(part) :], place + len(part), count)
                if part and len(part) == len(tokens):
                    last[slot] = batch.n_tokens - 1
            if module.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for slot, at in last.items():
                logits = numpy.ctypeslib.as_array(module.llama_get_logits_ith(context, at), (vocab_size,))
                token, (_, place, count) = int(logits.argmax()), running[slot]
                running[slot] = ([token], place, count + 1)
                if token in given.ends or count + 1 == given.max_tokens:
                    module.llama_memory_seq_rm(memory, slot, -1, -1)
                    del running[slot]
                    free.append(slot)
                    yield count + 1

    return str(module.__version__), generate


def transformers(given: argparse.Namespace, prompts: list[list[int]]) -> tuple[str, Generate]:
    """``generate`` on padded batches in the order of the file; a batch ends with its longest answer."""
    torch, module = map(importlib.import_module, ("torch", "transformers"))
    model = module.AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()
    settings = {"do_sample": False, "max_new_tokens": given.max_tokens, "eos_token_id": given.ends, "pad_token_id": 0}
    config = module.GenerationConfig(**settings)

    def generate() -> Iterator[int]:
        for first in range(0, len(prompts), given.batch):
            rows = prompts[first : first + given.batch]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            with torch.inference_mode():
                answers = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
            for answer in answers:
                yield 1 + min(
                    (place for place, token in enumerate(answer) if token in given.ends), default=len(answer) - 1
                )

    return str(module.__version__), generate


def run_one(peers: dict[str, Callable[[argparse.Namespace, list[Any]], tuple[str, Generate]]], column: str) -> None:
    """Run one engine once over a column of the workload and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=peers)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--ends", default=[], type=lambda text: [int(token) for token in text.split(",")])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    prompts = [json.loads(line)[column] for line in given.workload.read_text().splitlines()]
    began = time.monotonic()
    version, generate = peers[given.peer](given, prompts)
    loaded = time.monotonic()
    cpu_began = time.process_time()
    lengths = list(generate())
    ended, cpu_s = time.monotonic(), time.process_time() - cpu_began
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found: dict[str, Any] = {
        "peer": given.peer,
        "version": version,
        "dtype": given.dtype,
        "rows": len(lengths),
        "output_tokens": sum(lengths),
        "load_s": round(loaded - began, 3),
        "generate_s": round(ended - loaded, 3),
        "generate_cpu_s": round(cpu_s, 3),
        "peak_memory_bytes": peak * 1024,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    run_one({each.__name__: each for each in (batchgen, vllm, openvino, llama_cpp, transformers)}, "prompt_token_ids")
