"""The words of other tools lead to what is meant: in help, as flags, as keys of a job file and in Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_helpers import Shell

import batchgen
from batchgen.cli.help import is_heading
from batchgen.cli.main import cli
from batchgen.config.job import KEYS
from batchgen.config.load import load_job
from batchgen.core.errors import UsageError
from batchgen.core.synonyms import _TABLE, synonym_of

WORDS = """
quantization, quantize, mps, mac, windows, oom, docker, huggingface, proxy, deterministic, reproducible,
function calling, json mode, guided decoding, logging, verbose, python api, interrupt, gcs, excel, few-shot,
speculative decoding, llama.cpp, tensor parallel, token, resume, errors, seed, exit code, deadline, GPU, workers,
batch size, lora, peft, context length, kv cache, prefix caching, max_new_tokens, do_sample, temperature, top_p, stop,
logprobs, perplexity, json schema, pydantic, regex, grammar, labels, classification, zero-shot, embeddings, rerank,
matryoshka, csv, parquet, arrow, polars, pandas, openai, batch api, dataset, split, streaming, system prompt,
chat template, tools, thinking, reasoning, checkpoint, retry, cache, incremental, force, dry-run, estimate, cost,
timeout, ctrl-c, sigterm, slurm, kubernetes, ray, s3, azure, push to hub, lm-eval, benchmark, gguf, ollama, notebook,
security, uninstall, credentials, gated, threads, throughput, memory, roofline, shards, merge, lock, disk
""".replace("\n", " ")


@pytest.mark.parametrize("word", [word.strip() for word in WORDS.split(",")])
def test_a_word_of_the_field_leads_somewhere(shell: Shell, word: str) -> None:
    assert len(shell("help", *word.split()).out) > 100


TOPICS = {  # what the answer must say
    "thinking budget": "sampling.thinking_token_budget",
    "limit thoughts": "sampling.thinking_token_budget",
    "prompt injection": "input.special_tokens",
    "prefill-response": "input.continue_final_message",
    "budget of thoughts": "sampling.thinking_token_budget",
    "max_thinking": "sampling.thinking_token_budget",
    "output.max_thinking_tokens": "sampling.thinking_token_budget",
    "thinking": '"Thinking models"',
    "reasoning": '"Thinking models"',
    "ngl": "--device cuda puts the whole model on the GPU",
    "gpu-layers": "--device cuda puts the whole model on the GPU",
    "n-gpu-layers": "--device cuda puts the whole model on the GPU",
    "num_ctx": "engine.max_model_len",
    "half sentence": "input.continue_final_message",
    "assistant prefix": "input.continue_final_message",
    "kill -9": "the same command continues",
    "flash-attn": "are chosen by the device",
    "mmap": "The whole model must fit into the memory",
    "ram": "The whole model must fit into the memory",
    "gpu_memory_utilization": "a size such as 4GiB",
    "size": "engine.max_num_seqs",
    "batch": "engine.max_num_seqs",
    "time": "--max-runtime",
    "max runtime": "--max-runtime",
    "summary": "jobs/summarize.toml",
    "translate": "input.prompt",
    "truncation": "too_long",
    "preview": "Usage: batchgen try",
    "libreoffice": "CSV",
    "umlaut": "input.encoding",
    "few-shot": "Put what all prompts have in common first",
    "encoding": "input.encoding",
    "classes": '"Labels (classification)"',
    "sampling.choices": "classify.labels",
    "sampling.normalize": "classify.by",
    "labels": "Labels (classification)",
    "classify": "[classify]",
    "compare": "batchgen report A --compare B",
    "failed": "A row that failed",
    "error rows": "A row that failed",
    "wrong answers": "Wrong answers",
    "wrong rows": "jq -c",
    "list wrong rows": "jq -c",
    "rerun failed": "A row that failed",
    "bound": "What the report says",
    "date32": "dates and times become text",
    "timestamp": "dates and times become text",
    "parquet": "first the fields of the record",
    "twice as fast": "batchgen help slow",
    "quality": "Count the changes on rows of your own",
}


@pytest.mark.parametrize("topic", TOPICS)
def test_a_word_of_the_field_leads_to_what_is_meant(shell: Shell, topic: str) -> None:
    assert TOPICS[topic] in shell("help", *topic.split()).words


def test_a_name_is_found_only_where_it_stands_and_words_wherever_all_do(shell: Shell) -> None:
    said = shell("help", "output_tokens_max", code=2).err
    assert said.startswith('batchgen: error: no page, section or command is named "output_tokens_ma')
    found = "--heartbeat and bar are found in\n\n  * `batchgen help Watching`\n"
    assert shell("help", "--heartbeat", "bar").out == found


FLAGS = {  # typed by habit: what the one line must name
    "--weights": "--quantization",
    "--load-in-8bit": "--quantization",
    "--batch-size": "--max-num-seqs",
    "--concurrency": "--max-num-seqs",
    "--lora": "--adapter",
    "--enable-lora": "--adapter",
    "--verbose": "Watching",
    "--log-level": "Watching",
    "--debug": "Watching",
    "--resume": "the same command continues",
    "--checkpoint-dir": "the same command continues",
    "--gpu-memory-utilization": "--kv-cache-memory",
    "--kv-dtype": "--kv-cache-dtype",
    "--preset": "--generation-config",
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--force": "--overwrite",
    "--yes": "--overwrite",
    "--schema": "--structured-outputs",
    "--json-schema": "--structured-outputs",
    "--guided-json": "--structured-outputs",
    "--dry-run": "batchgen help plan",
    "--data-parallel-size": "--workers",
    "--tensor-parallel-size": "none is split over devices; here it is --workers",
    "--column": "--columns",
    "--prompts": "--prompt",
    "--retries": "the same command runs them",
    "--retry-errors": "the same command runs them",
    "--tokens": "--max-tokens",
    "--chunk-size": "--max-num-batched-tokens",
    "--logits-all": "--prompt-logprobs",
    "--grammar-file": "--structured-outputs",
    "--reasoning-effort": "--chat-template-kwargs",
    "-j": "--threads",
    "--num-workers": "--workers",
    "--tool-call-parser": "--parse",
    "--reasoning-parser": "--parse",
    "--no-prefix-caching": "it is always on",
    "--no-batch-invariant": "run --without batch-invariant gives it up on a GPU",
    "--no-share-duplicates": "it is always on",
    "--ctx-size": "--max-model-len",
    "--num-return-sequences": "--n",
    "--dataset": "hf:NAME",
    "--push-to-hub": "--publish",
    "--torch-dtype": "--dtype",
    "--system-prompt": "--system",
    "--input-file": "--input",
    "--output-dir": "--output",
    "--reasoning-budget": "--thinking-token-budget",
    "--max-thinking-tokens": "--thinking-token-budget",
    "--n-gpu-layers": "--device cuda puts the whole model on the GPU",
    "-ngl": "--device cuda puts the whole model on the GPU",
    "-c": "--max-model-len",
    "--flash-attn": "are chosen by the device",
    "--mmap": "batchgen help Memory",
    "--mem-fraction-static": "a size such as 4GiB",
    "--choices": "--labels",
    "-v": "Watching",
    "--name": "hf:NAME",
    "--num-beams": "no beam search",
    "--repeat-penalty": "--repetition-penalty",
    "--host": "nothing is served",
    "--download-dir": "HF_HOME",
}


NAMES = {  # each a flag, a key or a word of the table
    "vLLM's flags": """
        tokenizer tokenizer-mode trust-remote-code dtype revision tokenizer-revision max-model-len quantization
        enforce-eager kv-cache-dtype block-size enable-prefix-caching kv-cache-memory-bytes gpu-memory-utilization
        swap-space cpu-offload-gb max-num-seqs max-num-batched-tokens enable-chunked-prefill tensor-parallel-size
        pipeline-parallel-size data-parallel-size seed enable-lora lora-modules max-lora-rank guided-decoding-backend
        structured-outputs-config reasoning-parser enable-auto-tool-choice tool-call-parser chat-template
        generation-config served-model-name load-format download-dir device speculative-config task runner convert
        limit-mm-per-prompt hf-token logits-processors max-logprobs attention-backend async-scheduling hf-overrides
        compilation-config pooler-config api-key host port distributed-executor-backend num-gpu-blocks-override""",
    "vLLM's SamplingParams": """
        n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
        stop_token_ids bad_words include_stop_str_in_output ignore_eos max_tokens min_tokens logprobs prompt_logprobs
        logits_processors truncate_prompt_tokens structured_outputs guided_decoding logit_bias allowed_token_ids
        thinking_token_budget repetition_detection logprob_token_ids use_beam_search""",
    "OpenAI's bodies": """
        model messages max_tokens max_completion_tokens temperature top_p n stop seed logprobs top_logprobs logit_bias
        presence_penalty frequency_penalty response_format tools tool_choice parallel_tool_calls stream functions
        function_call modalities custom_id input prompt encoding_format dimensions echo best_of""",
    "transformers' generate": """
        max_new_tokens min_new_tokens do_sample num_beams num_return_sequences length_penalty early_stopping typical_p
        no_repeat_ngram_size repetition_penalty torch_dtype device_map attn_implementation load_in_8bit load_in_4bit
        trust_remote_code batch_size padding truncation max_length cache_dir""",
    "llama.cpp's flags": """
        ngl n-gpu-layers c ctx-size n-predict t threads b batch-size ub ubatch-size temp top-k top-p min-p
        repeat-penalty mirostat samplers f file grammar json-schema s seed mlock no-mmap fa flash-attn np parallel
        cont-batching cache-type-k cache-type-v lora model hf-repo hf-file sys system-prompt v verbose""",
}


@pytest.mark.parametrize("tool", NAMES)
def test_the_names_of_a_tool_lead_somewhere(tool: str) -> None:
    flags = {flag.lstrip("-") for option in cli.commands["run"].params for flag in option.opts}
    keys = {key for section in KEYS.values() for key in section}
    assert [name for name in NAMES[tool].split() if not (name in flags | keys or synonym_of(name))] == []


@pytest.mark.parametrize(
    ("command", "flag"),
    [*(("run", flag) for flag in FLAGS), ("try", "-ngl")],  # -n takes a value in try
)
def test_a_flag_typed_by_habit_names_the_one_that_is_meant(shell: Shell, command: str, flag: str) -> None:
    (line,) = shell(command, flag, 2, code=2).err.splitlines()
    assert line.startswith(f"batchgen: error: No such option '{flag}' (") and FLAGS[flag] in line
    assert "id you mean" not in line


def test_all_unknown_flags_are_named_at_once_without_those_that_ask_for_what_happens_anyway(shell: Shell) -> None:
    anyway = ["--tensor-parallel-size", "1", "--pipeline-parallel-size=1", "--enforce-eager", "--enable-prefix-caching"]
    refused = ["--gpu-memory-utilization", "0.9", "--data-parallel-size=2", "--dtype", "bfloat16", "--whatever"]
    (line,) = shell("run", "-i", "a.jsonl", *anyway, *refused, code=2).err.splitlines()
    assert re.findall(r"'(--[a-z-]+)'", line) == ["--gpu-memory-utilization", "--data-parallel-size", "--whatever"]
    assert "--kv-cache-memory" in line and "--workers" in line
    assert "nowhere.toml" in shell("run", "nowhere.toml", *anyway, "--disable-log-requests", code=2).err


@pytest.mark.parametrize("flag", ["--max-tokns", "--max-token", "--max_tokens", "--kv_cache_memory"])
def test_a_flag_that_is_misspelt_names_the_nearest_alone(shell: Shell, flag: str) -> None:
    meant = "--kv-cache-memory" if "kv" in flag else "--max-tokens"
    said = shell("run", flag, 3, code=2).err
    assert said == f"batchgen: error: No such option '{flag}' (did you mean \"{meant}\"?)\n"


def test_one_choice_says_how_to_give_more(shell: Shell) -> None:
    said = shell("run", "--labels", "positiv", code=2).err
    assert said.endswith("not of 1; give --labels A,B, or --labels once per label\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("run-batch", "batchgen run"), ("generate", "batchgen run"), ("resume", "batchgen run")),
        *(("validate", "batchgen plan"), ("init", "batchgen help tutorial"), ("show", "batchgen cat")),
        *(("logs", "batchgen status"), ("ls", "batchgen status"), ("download", "run, which downloads")),
        *(("stop", "Ctrl-C or SIGTERM"), ("quantize", "batchgen run --quantization w8a16")),
        ("serve", "no server: see batchgen help"),
    ],
)
def test_a_command_of_another_tool_leads_to_what_is_meant(shell: Shell, typed: str, meant: str) -> None:
    said = shell(typed, "x", code=2).err
    assert said.startswith(f"batchgen: error: No such command '{typed}' (here it is {meant}")


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        *((["--device", "gpu"], '(did you mean "cuda"?)'), (["--dtype", "fp16"], '(did you mean "float16"?)')),
        *((["--dtype", "float64"], '(did you mean "float32"?)'), (["--output-path", "out"], "(here it is --output)")),
        (["--quantization", "awq"], "give the model's bfloat16 release"),
        (["--quantization", "int8"], "(8 bits are w8a16, and with activations in 8 bits too w8a8)\n"),
        (["-n", "5"], "(the limit of tokens is --max-tokens; here it is --n)"),
    ],
)
def test_a_value_of_another_tool_leads_to_what_is_meant(shell: Shell, flags: list[str], meant: str) -> None:
    assert meant in shell("run", "x.jsonl", "-m", "m", *flags, code=2).err


@pytest.mark.parametrize(
    ("section", "key", "name"),
    [
        ("sampling", "max_new_tokens", "sampling.max_tokens"),
        ("sampling", "stop_sequences", "sampling.stop"),
        ("engine", "gpu_memory_utilization", "engine.kv_cache_memory"),
        ("engine", "kv_dtype", "engine.kv_cache_dtype"),
        ("engine", "batch_size", "engine.max_num_seqs"),
        ("model", "weights", "model.quantization"),
        ("model", "lora_path", "model.adapter"),
        ("output", "reasoning_parser", "output.parse"),
    ],
)
def test_a_key_of_another_tool_names_the_one_here(tmp_path: Path, section: str, key: str, name: str) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f"[{section}]\n{key} = 1\n")
    with pytest.raises(UsageError, match=rf"{section}\.{key}: unknown key \(.*here it is {name}\)$"):
        load_job(job)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_new_tokens", r"here it is sampling\.max_tokens"),
        ("prompts", r"[^-]*; here it is input\.prompt"),
        ("tensor_parallel_size", r"[^-]*; here it is cluster\.workers"),
    ],
)
def test_an_argument_of_another_library_names_the_key_and_no_flag(name: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown argument '{name}' \({meant}\)$"):
        batchgen.generate(["a"], model="m", **{name: 2})


def test_every_answer_of_the_table_is_there_and_no_word_hides_a_name_that_exists() -> None:
    names = {f"{section}.{key}" for section, keys in KEYS.items() for key in keys}
    for synonym in _TABLE:
        assert synonym.topic in (names if synonym.is_key else cli.commands) or is_heading(synonym.topic), synonym
    assert [item.flag for keys in KEYS.values() for item in keys.values() if synonym_of(item.flag)] == []
