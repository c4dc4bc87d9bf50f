"""Table of words that other tools and their pages use, each with its name here.

They count before similar spellings, which may mislead: ``--resume`` resembles ``--reuse``.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Synonym(NamedTuple):
    """Counterpart of a word: a key (``engine.threads``) or a page, heading or command of ``help``; with a note."""

    topic: str
    note: str = ""

    @property
    def is_key(self) -> bool:
        return bool(re.fullmatch(r"[a-z]+\.[a-z_]+", self.topic))

    def hint(self, name: str = "") -> str:
        """The hint at an error's end: the key to use in place of the word, as ``name``, or the page to read."""
        pointer = f"here it is {name or self.topic}" if self.is_key else f"see batchgen help {self.topic}"
        return f" ({self.note}; {pointer})" if self.note else f" ({pointer})"


_TABLE: dict[Synonym, str] = {
    # The model
    Synonym("model.path"): "model-name, model-id, pretrained, checkpoint-path, model-path, hf-repo, hf-file",
    Synonym(
        "model.quantization", "8 bits are w8a16, and with activations in 8 bits too w8a8"
    ): "weights, activations, quantize, int8, load-in-8bit, load-in-4bit, w8a8, w8a16, bits, 8bit, fp8, quant",
    Synonym(
        "model.quantization", "no such release is read: give the model's bfloat16 release, and w8a16 or w8a8 for 8 bits"
    ): "awq, gptq, bitsandbytes, bnb, nf4, int4, 4bit",
    Synonym("model.adapter"): "lora, lora-path, enable-lora, lora-modules, max-lora-rank, peft, adapters, qlora",
    Synonym("model.dtype"): "torch-dtype, precision, bf16, fp16, half, data-type",
    Synonym("model.tokenizer"): "tokenizer-path, tokenizer-name, tokenizer-mode",
    Synonym("model.revision"): "branch, commit, tag, model-revision, tokenizer-revision",
    Synonym("model.device"): "gpu, cuda-device, device-map, accelerator",
    Synonym("GPUs", "GPUs are chosen by --device"): "cuda, nvidia, rocm, amd",
    Synonym(
        "GPUs", "--device cuda puts the whole model on the GPU; it is not split between devices"
    ): "ngl, n-gpu-layers, gpu-layers, num-gpu, offload",
    Synonym(
        "GPUs", "all kernels, also for attention, are chosen by the device"
    ): "flash-attn, fa, flash-attention, attn-implementation, attention-backend, enforce-eager, compilation-config, "
    "cuda-graph, async-scheduling",
    Synonym("Memory", "the whole model must fit into the memory"): "ram, mmap, no-mmap, mlock, cpu-offload-gb, swap",
    Synonym("GGUF"): "llama.cpp, gguf-file, ollama",
    Synonym(
        "Models"
    ): "huggingface, hub, trust-remote-code, supported models, architectures, download, load-format, hf-overrides",
    Synonym(
        "Models", "models read and write text"
    ): "image, images, vision, vlm, multimodal, modalities, limit-mm-per-prompt, audio, video",
    Synonym("Environment variables", "HF_HOME is the folder of downloads"): "download-dir, cache-dir, hf-home",
    Synonym("Credentials"): "hf-token, token, gated, login, api-key, proxy, https-proxy, auth",
    # The input
    Synonym("input.path"): "file, files, data, dataset-path, input-file, data-files, f",
    Synonym(
        "A dataset of the Hub", 'a dataset is --input "hf:NAME?split=S&config=C"'
    ): "name, dataset, hf-dataset, dataset-name, split, config, subset, datasets, streaming, dataset-split",
    Synonym("input.prompt"): "template, prompt-template, prompt-column, text-column, field, text, instruction",
    Synonym("input.prompt", "the rows are the input, and this is their template"): "prompts",
    Synonym(
        "input.prompt", "the prompt asks for it, as in jobs/summarize.toml"
    ): "summary, summaries, summarize, summarization, translate, translation",
    Synonym("input.messages"): "conversation, conversations, chat-column, sharegpt",
    Synonym("input.system"): "system-prompt, system-message, persona, sys",
    Synonym(
        "input.chat_template", "none sends prompts as they are"
    ): "chat, no-chat, apply-chat-template, no-chat-template, raw, completion",
    Synonym(
        "input.continue_final_message", "the model continues the assistant's last message"
    ): "add-generation-prompt, assistant-prefill, prefill-response, response-prefix, continue-final, "
    "prefix-completion, assistant-prefix, half sentence",
    Synonym(
        "input.regenerate", "each turn of the assistant is generated again, and sees the new ones before it"
    ): "multi-turn, multiturn, turns, on-policy, response-regeneration, regeneration, "
    "regenerate-responses, self-play, speculators, specforge, train a speculator, rewrite chats",
    Synonym(
        "input.special_tokens", "rows write special tokens unless it says refuse; text is gone"
    ): "split-special-tokens, prompt injection, injection, control-tokens, sanitize, untrusted",
    Synonym("input.columns"): "column, keep-columns, keep, remove-columns, passthrough, metadata",
    Synonym("input.id"): "custom-id, key, key-column, id-column, index-column, row-id",
    Synonym("input.limit"): "max-samples, num-samples, max-rows, head, num-examples, sample, first, limit-rows",
    Synonym(
        "input.encoding"
    ): "charset, latin-1, cp1252, windows-1252, utf-16, iso-8859-1, ansi, umlaut, umlauts, mojibake",
    Synonym("input.delimiter"): "sep, separator, tsv, delim",
    Synonym("CSV", "save a workbook as CSV"): "excel, xlsx, xls, spreadsheet, libreoffice, calc",
    Synonym(
        "The model itself", "prompts that begin alike are computed once: put first what all share"
    ): "few-shot, shared prefix, prefix caching, prompt caching, prefix-cache, radix, num-fewshot",
    Synonym(
        "too_long", "a prompt is never cut, but texts for embeddings are"
    ): "truncation, truncate-prompt-tokens, truncation-side",
    Synonym("Tool calls"): "function calling, function-call, functions, tools, tool-choice, "
    "parallel-tool-calls, tool use, mcp, agents",
    # Sampling
    Synonym(
        "sampling.max_tokens"
    ): "max-new-tokens, max-completion-tokens, n-predict, max-length, max-output-tokens, length, max-gen-toks, tokens",
    Synonym("sampling.min_tokens"): "min-new-tokens, min-length",
    Synonym("sampling.repetition_penalty"): "repeat-penalty, rep-pen",
    Synonym(
        "sampling.min_p", "top_k, top_p and min_p leave out unlikely tokens"
    ): "typical-p, mirostat, samplers, top-a, tfs, epsilon-cutoff, eta-cutoff",
    Synonym("sampling.seed"): "s, rng-seed, manual-seed",
    Synonym(
        "sampling.temperature", "0, the default, is greedy"
    ): "do-sample, greedy, temp, sampling-temperature, creativity",
    Synonym(
        "sampling.n", "there is no beam search; n draws several answers"
    ): "num-beams, beam-search, use-beam-search, length-penalty, early-stopping",
    Synonym("sampling.n"): "num-return-sequences, best-of, num-generations, samples, candidates, num-samples-per-row",
    Synonym(
        "sampling.stop"
    ): "stop-sequences, stop-words, until, eos, end, stop-strings, stop-sequence, include-stop-str-in-output",
    Synonym(
        "sampling.generation_config", "auto takes the model's sampling values"
    ): "preset, sampling-preset, default-sampling, recommended, override-generation-config",
    Synonym("sampling.max_repeats"): "repetition-detection, loop, loops, no-repeat-ngram-size, repetition, ngram",
    Synonym("Distillation"): "teacher, student, distill, knowledge distillation, kd, soft labels, top-k logprobs, "
    "topk logprobs, assistant-mask, logits, kl",
    Synonym("output.logprobs_dtype"): "output-dtype, logprob-dtype",
    Synonym("sampling.logprobs"): "top-logprobs, probabilities, return-logprobs, max-logprobs, logprob-token-ids",
    Synonym("sampling.prompt_logprobs"): "perplexity, loglikelihood, echo, ppl, logits-all",
    Synonym(
        "sampling.structured_outputs"
    ): "guided-json, guided-regex, guided-choice, guided-grammar, json-schema, schema, response-format, json mode, "
    "json, pydantic, guided decoding, grammar, regex, constrained, outlines, structured-output, xgrammar, "
    "guided-decoding-backend, structured-outputs-config, grammar-file",
    Synonym(
        "classify.labels", 'the recipe is "Labels (classification)"'
    ): "choices, classes, classification, zero-shot, classify, label, multiple choice, choice, candidate-labels",
    Synonym("classify.by", "mean is per token"): "normalize, length-normalization, normalized-accuracy",
    Synonym("sampling.allowed_token_ids"): "logits-processors, logits-processor, allowed-tokens",
    Synonym("exactness"): "deterministic, determinism, reproducible, reproducibility, batch-invariance, random-seed",
    # Embeddings
    Synonym("embed.pooling", "--pooling gives embeddings"): "embed, embedding, embeddings, vector, vectors, encode, "
    "task, runner, convert, pooler-config",
    Synonym("Reranking"): "rerank, reranker, cross-encoder, relevance, rag",
    Synonym("embed.prompt", "a name of the checkpoint or the text itself"): "prompt-name, prefix, instruct",
    Synonym("Late interaction"): "colbert, pylate, maxsim, multi-vector, multivectorencoder, late-interaction",
    Synonym("embed.dimensions"): "truncate-dim, matryoshka, dim, dims",
    # The engine
    Synonym(
        "engine.max_num_seqs", "batches form by themselves, and this bounds them"
    ): "batch-size, max-batch-size, concurrency, max-concurrent-requests, num-seqs, per-device-batch-size, bs, "
    "batch, size, np, parallel, cont-batching, padding",
    Synonym("engine.max_num_batched_tokens", "prompts are prefilled in parts of this size"): "chunked-prefill, "
    "enable-chunked-prefill, prefill-chunk-size, chunk-size, max-prefill-tokens, max-batch-tokens, token-budget, "
    "b, ub, ubatch-size",
    Synonym("engine.kv_cache_memory"): "kv-memory, kv-cache-memory-bytes, oom, out of memory, swap-space, kv-cache, "
    "num-gpu-blocks-override",
    Synonym(
        "engine.kv_cache_memory", "it takes a size such as 4GiB, not a share"
    ): "gpu-memory-utilization, mem-fraction-static",
    Synonym("engine.kv_cache_dtype"): "kv-dtype, kv-cache-quantization, cache-type-k, cache-type-v",
    Synonym(
        "engine.max_model_len"
    ): "ctx-size, context-length, n-ctx, max-seq-len, context, max-context, max-seq-length, num-ctx, c",
    Synonym(
        "slow", "it is always on"
    ): "enable-prefix-caching, apc, automatic-prefix-caching, longest-first, forecast-memory, share-duplicates, "
    "no-prefix-caching, no-longest-first, no-forecast-memory, no-share-duplicates",
    Synonym("exactness", "run --without batch-invariant gives it up on a GPU"): "no-batch-invariant",
    Synonym("engine.threads"): "num-threads, n-threads, cpu, cpus, omp-num-threads, cores, cpu-threads, t",
    Synonym("engine.threads", "a JSON schema is --structured-outputs"): "j",
    Synonym(
        "slow", "speculative decoding is not done"
    ): "speculative decoding, speculate, speculative-config, draft-model, spec-decode, mtp, eagle",
    Synonym("slow"): "throughput, performance tuning, fast, faster, slowness, speed, speed up, optimize",
    Synonym("Quantization", "report --compare shows what it costs in rows of your own"): "quality, quality loss",
    # Several processes
    Synonym(
        "cluster.workers", "copies of a model share the rows, and none is split over devices"
    ): "data-parallel-size, num-workers, gpus, dp, replicas, num-gpus, data-parallel, dp-size, processes, multi-gpu, "
    "distributed, tensor-parallel-size, tensor parallel, pipeline-parallel-size, tp, pp, model parallel, "
    "expert-parallel, sharding, tp-size",
    Synonym("cluster.step_timeout"): "patience, request-timeout, worker-timeout",
    Synonym("cluster.load_timeout"): "load-patience",
    Synonym("cluster.ray"): "distributed-executor-backend, ray-address",
    Synonym("cluster.resources"): "accelerator-type",
    Synonym("cluster.cpus_per_worker"): "worker-cpus, num-cpus",
    Synonym("cluster.gpus_per_worker"): "worker-gpus",
    Synonym("Docker"): "container, image, dockerfile",
    Synonym("Kubernetes"): "k8s, pod",
    Synonym("SLURM"): "sbatch, job array, hpc, srun",
    # The run
    Synonym(
        "output.path"
    ): "out, output-path, output-folder, output-dir, output-file, save-path, destination, result, results",
    Synonym(
        "output.parse", "reasoning, tool_calls and json are taken out of the text"
    ): "parse-tools, parse-json, json-output, parsed, tool-call-parser, enable-auto-tool-choice, parse-tool-calls",
    Synonym(
        "output.parse", 'it takes the thoughts out of the text; the recipe is "Thinking models"'
    ): "split-reasoning, reasoning-parser, thinking, reasoning, think, enable-reasoning, thoughts",
    Synonym(
        "input.chat_template_kwargs", "a template may have such a switch"
    ): "reasoning-effort, enable-thinking, no-think, disable-thinking",
    Synonym("sampling.thinking_token_budget"): "thinking budget, limit thoughts, limit thinking, thinking-tokens, "
    "budget of thoughts, max-thinking, thinking-budget-tokens, reasoning-budget-tokens, "
    "max-thinking-tokens, reasoning-budget, reasoning-tokens, max-reasoning-tokens, budget-tokens",
    Synonym("eval.expected", "the report counts equal answers"): "gold, reference, target, ground-truth, accuracy, "
    "evaluate, eval, metric, score, exact-match",
    Synonym("Wrong answers"): "wrong rows, list wrong rows, mistakes, show wrong, all wrong rows",
    Synonym("eval.extract"): "answer, filter, answer-regex, extraction",
    Synonym("output.publish"): "push-to-hub, upload, push, hub-id, save-to-hub",
    Synonym("output.reuse"): "cache, skip-completed, cached-results, incremental, skip-existing, deduplicate",
    Synonym("Resume", "the same command continues"): "resume, continue, restart, checkpoint, checkpoint-dir, recover, "
    "crash, resume-from-checkpoint, kill, kill -9, sigkill",
    Synonym(
        "A row that failed", "rows are not tried again by themselves; once corrected, the same command runs them"
    ): "error rows, rerun failed, retry failed, failed rows, retry, retries, max-retries, num-retries, retry-errors",
    Synonym("run", "--overwrite starts again"): "force, yes, overwrite-output, clean, start over, overwrite-output-dir",
    Synonym("plan"): "dry-run, strict, validate, estimate, eta, how long",
    Synonym(
        "try", "it shows prompts as they are sent"
    ): "preview, show-prompt, prompt-preview, rendered, playground, demo",
    Synonym("check"): "verify, test, self-test, doctor",
    Synonym("Watching"): "verbose, v, debug, log-level, logging, log, progress, tqdm, monitor",
    Synonym("Prometheus"): "metrics, metrics-file, grafana, textfile collector, node exporter",
    Synonym("Stopping early", "--max-runtime and --deadline stop a run"): "timeout, time-limit, interrupt, ctrl-c, "
    "sigterm, cancel, stop-after, walltime, max-time, time, runtime, max-runtime",
    Synonym("What a run costs", "report --price-per-hour shows it"): "cost, price, dollars, money, max-cost, budget, "
    "price-per-hour",
    Synonym("S3 and other stores"): "gcs, google cloud, gs, bucket, azure, abfs, az, blob, minio, aws, object store",
    Synonym("Parquet in and out"): "arrow, polars, duckdb, pandas output",
    Synonym("Parquet in and out", "dates and times become text"): "date32, timestamp, timestamps, datetime, dates",
    Synonym("What the report says", "what most of the time went into"): "bound, bound-by, bottleneck",
    Synonym("python"): "from python, python api, library, sdk, notebook, jupyter, api, import, pandas, dataframe, llm, "
    "map-batches, ray data, spark",
    Synonym("OpenAI Batch files"): "openai, batch api, run-batch, requests, chat completions, encoding-format",
    Synonym(
        "OpenAI Batch files", "nothing is served: requests are read from a file"
    ): "server, serve, host, port, endpoint, served-model-name, stream",
    Synonym("Evaluate with lm-evaluation-harness"): "lm-eval, lm-evaluation-harness, harness, benchmark, mmlu",
    Synonym(
        "CPU types", "it runs on Linux on x86-64, and on Arm in an emulator; macOS is not tested"
    ): "windows, mac, macos, mps, arm, apple, wsl, requirements, m1",
}


_COMMANDS = {
    "batchgen run": "run-batch, generate, resume, start, exec, submit, batch, infer, inference, predict, chat, "
    "complete, embed, classify, update, continue, launch, job",
    "batchgen plan": "validate, estimate, dry-run, lint, count",
    "batchgen try": "preview, demo, sample",
    "batchgen status": "logs, log, ls, list, ps, info, watch, monitor, progress",
    "batchgen cat": "show, view, print, head, export, read, output, outputs",
    "batchgen report --compare": "compare, diff, eval, evaluate",
    "batchgen check": "test, doctor, verify, proof",
    "batchgen bench": "benchmark, throughput, perf",
    "batchgen env": "version, versions, system",
    "batchgen help tutorial": "init, new, create, quickstart, docs",
    "batchgen run --publish": "upload, push, publish",
    "batchgen run --quantization w8a16": "quantize, convert",
    "run, which downloads a model of the Hub": "download, pull, fetch",
    "Ctrl-C or SIGTERM, and the same run resumes": "stop, kill, cancel, abort, pause",
    "no server: see batchgen help compare": "serve, server, api",
}
_VALUES = {  # by key, other names of its values
    "model.device": {"gpu": "cuda", "nvidia": "cuda", "cuda:all": "cuda", "mac": "mps", "metal": "mps", "intel": "xpu"},
    "model.dtype": {"fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    | {"f32": "float32", "float": "float32", "float64": "float32", "fp64": "float32", "double": "float32"},
}
# Arguments of other tools, with values that ask for something that batchgen does anyway.
_ANYWAY: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), (1,)),
    **dict.fromkeys(("enforce_eager", "disable_log_stats", "disable_log_requests"), (False, True)),
    **dict.fromkeys(("enable_prefix_caching", "enable_chunked_prefill"), (True,)),
    **dict.fromkeys(("trust_remote_code", "enable_lora"), (False,)),
}


def _plain(word: str) -> str:
    return re.sub(r"[\W_]+", "", word.casefold())


_TYPED = {_plain(word): meant for meant, words in _COMMANDS.items() for word in words.split(", ")}
_WORDS = {_plain(word): synonym for synonym, words in _TABLE.items() for word in words.split(", ")}


def synonym_of(word: str) -> Synonym | None:
    """The entry for another tool's word; None for a word that the table lacks."""
    return _WORDS.get(_plain(word))


def command_of(word: str) -> str:
    """The text to type in place of another tool's command; "" for a word that the table lacks."""
    return _TYPED.get(_plain(word), "")


def value_of(key: str, value: str) -> str:
    """The value of ``section.key`` that another tool calls ``value``; "" if the table lacks it."""
    return _VALUES.get(key, {}).get(value.lower(), "")


def is_done_anyway(name: str, value: object) -> bool:
    """Whether an argument of another tool asks for something that batchgen does anyway."""
    return any(value is one or (value == one and type(value) is type(one)) for one in _ANYWAY.get(name, ()))
