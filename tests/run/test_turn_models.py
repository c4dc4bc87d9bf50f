"""Chats generated again turn by turn with the sample model: as a loop by hand over transformers makes them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from repeats import nightly
from run_helpers import MODEL, REPOSITORY, JobMaker

import batchgen
from batchgen.run.loader import load_engine

MAX_TOKENS = 24  # cuts the longest answers


@cache
def chats() -> list[list[dict[str, Any]]]:
    """Chats of 2 to 6 turns over the sample questions; each fifth has a system prompt, each fourth no last answer."""
    lines = (REPOSITORY / "sample_data" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = iter([json.loads(line)["question"] for line in lines])
    made = []
    for number in range(40):
        chat = [{"role": "system", "content": "You are terse."}] if number % 5 == 0 else []
        for _ in range(2 + number % 5):
            chat += [{"role": "user", "content": next(questions)}, {"role": "assistant", "content": "an old answer"}]
        made.append(chat[:-1] if number % 4 == 3 else chat)
    return made


def by_hand(count: int) -> list[tuple[list[dict[str, Any]], list[str]]]:
    """The first chats by a loop over transformers: greedy, in float32, one after the other."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    ends = {tokenizer.eos_token_id}
    made = []
    for chat in chats()[:count]:
        said, reasons = list[dict[str, Any]](), list[str]()
        for message in [*chat, *([] if chat[-1]["role"] == "assistant" else [{"role": "assistant"}])]:
            if message["role"] != "assistant":
                said.append(message)
                continue
            prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
            settings = {"do_sample": False, "max_new_tokens": MAX_TOKENS, "eos_token_id": [*ends]}
            with torch.inference_mode():
                [found] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings).tolist()
            tokens = found[ids.shape[1] :]
            said.append({"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)})
            reasons.append("stop" if tokens[-1] in ends else "length")
            if reasons[-1] == "length":
                break
        made.append((said, reasons))
    return made


def records(job: JobMaker, name: str, count: int, **engine: int) -> list[dict[str, Any]]:
    job.write([{"id": i, "chat": chat} for i, chat in enumerate(chats()[:count])])
    spec = job.spec(
        model={"dtype": "float32"},
        input={"prompt": None, "messages": "chat", "regenerate": "assistant", "columns": []},
        sampling={"max_tokens": MAX_TOKENS},
        engine={"threads": 1, **engine},
    )
    return job.elsewhere(name, spec, engine_factory=load_engine)


@pytest.mark.parametrize("count", [5, nightly(40)])
def test_chats_are_those_of_a_loop_by_hand(job: JobMaker, count: int) -> None:
    found = records(job, "out", count)
    assert [(record["messages"], record["finish_reasons"]) for record in found] == by_hand(count)
    reasons = [reason for record in found for reason in record["finish_reasons"]]
    assert len(reasons) > 2 * count and ({*reasons} == {"stop", "length"} or count == 5)


def test_company_and_memory_change_no_turn_and_most_of_a_prompt_is_cached(job: JobMaker) -> None:
    whole = records(job, "out", 20, block_size=16)
    cache = batchgen.read_report(job.folder / "out")["prefix_cache"]
    assert cache["hit_rate"] > 0.4
    assert records(job, "alone", 20, max_num_seqs=1, block_size=16) == whole
    assert records(job, "tight", 20, max_num_seqs=7, max_num_batched_tokens=19, block_size=8) == whole
