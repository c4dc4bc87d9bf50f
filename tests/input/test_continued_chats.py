"""``continue_final_message``: prompts of chats whose last turn goes on, as transformers makes them, and refusals."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import PUBLISHED, TOOLS, fix_date
from input_helpers import loaded, openai_line, told, write_tokenizer
from run_helpers import MODEL, JobMaker, quiet

import batchgen
from batchgen.config.load import load_job
from batchgen.core.errors import UsageError
from batchgen.run.job import run_job
from batchgen.text.chat import CONTINUES, ChatTemplateError
from batchgen.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "What is 2 + 2?"}
FINAL = [
    *("It is", " It is ", "It is\n\n", "", "so, é 🙂", "a<|im_end|>b", "THEFINALMESSAGE", "{{ x }}"),
    *("<think>\nLet me see", "<think>\nFour.\n</think>\n\n4", "<think>Four.</think> 4 "),
]
CHATS = [
    *([USER, {"role": "assistant", "content": text}] for text in FINAL),
    *([USER, {"role": "assistant", "content": text}, USER, {"role": "assistant", "content": text}] for text in FINAL),
    [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": [{"type": "text", "text": "It is "}]}],
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    now = datetime(2026, 5, 1)
    fix_date(now, monkeypatch)
    folder = write_tokenizer(tmp_path, chat_template=PUBLISHED[name])
    ours, theirs = Tokenizer.load(folder, now), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.chat_template is not None
    num_equal = 0
    for more in ({}, {"tools": TOOLS}):
        for chat in CHATS:
            [found] = ours.chat_template.render([{**more, "messages": chat, CONTINUES: True}])
            try:
                wanted = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True, **more)
            except Exception:  # templates may raise anything
                assert isinstance(found, ChatTemplateError), (chat, found)
                continue
            assert found == wanted
            num_equal += 1
    assert num_equal > 20


BEGUN = {"role": "assistant", "content": "It is "}
CALLING = {"role": "assistant", "content": "so", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


def test_a_row_is_continued_where_the_job_says_so() -> None:
    chat = {"messages": [USER, BEGUN]}
    assert told(loaded(), chat, continue_final_message=True).endswith("<|im_start|>assistant\nIt is ")
    assert told(loaded(), chat).endswith("It is <|im_end|>\n<|im_start|>assistant\n")
    parts = {"role": "assistant", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "is "}]}
    found = told(loaded(), {"messages": [USER, parts], "system": ""}, continue_final_message=True, system="S")
    assert found.endswith("<|im_start|>assistant\nIt\nis ") and "<|im_start|>system\nS<|im_end|>" in found


def test_a_request_in_openais_form_says_it_itself_as_in_vllm() -> None:
    def end(job: bool, **body: Any) -> str:
        line = openai_line(messages=[USER, BEGUN], **body)
        return told(loaded(), line, continue_final_message=job).rpartition("assistant\n")[2]

    for job in (False, True):
        assert end(job, continue_final_message=True, add_generation_prompt=False) == "It is "
        assert end(job, continue_final_message=False) == ""
        assert end(job) == end(job, continue_final_message=None) == ("It is " if job else "")
        found = end(job, continue_final_message=True, add_generation_prompt=True)
        assert found == "bad_param: body field 'add_generation_prompt' is not supported with this value"


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"messages": [USER]}, "messages: the last message is of role 'user'"),
        ({"messages": [USER, BEGUN, USER]}, "messages: the last message is of role 'user'"),
        ({"messages": [USER, CALLING]}, "messages: the last message calls tools"),
    ],
)
def test_a_chat_that_ends_otherwise_is_an_error_row(columns: dict[str, Any], problem: str) -> None:
    why = "continue_final_message needs a chat that ends in a text of the assistant"
    assert told(loaded(), columns, continue_final_message=True) == f"bad_param: {problem}: {why}"


def test_a_prompt_that_is_no_chat_is_an_error_row_that_says_so() -> None:
    said = "bad_param: column 'prompt' is not a chat: continue_final_message needs messages that end with"
    assert told(loaded(), {"prompt": "Hi"}, continue_final_message=True) == f"{said} an assistant text"


def test_a_template_that_changes_the_text_is_an_error_row() -> None:
    for change in ("upper", "replace('is', 'was')", "truncate(3, True, '')"):
        loud = f"{{% for m in messages %}}{{{{ m.content | {change} }}}}{{% endfor %}}"
        [found] = loaded(loud).render_chats([{"messages": [USER, BEGUN], CONTINUES: True}])
        assert isinstance(found, ChatTemplateError), found
        assert "changes the text of the final message" in str(found) or "does not show" in str(found)


@pytest.mark.parametrize(
    "keys", [{"prompt": "{q}"}, {"prompt_token_ids": "ids"}, {"messages": "m", "chat_template": "none"}]
)
def test_a_job_without_chats_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"input\.continue_final_message needs chats: name their column in"):
        input_ = {"path": "x", "continue_final_message": True, **keys}
        load_job(None, {"model": {"path": "m"}, "input": input_, "output": {"path": "o"}})


def test_the_text_is_the_continuation_alone(job: JobMaker) -> None:
    asked = {"role": "user", "content": 'Write "shadow" in capital letters.'}
    job.write([{"messages": [asked, {"role": "assistant", "content": "SHA"}]}, {"messages": [asked]}])
    keys = {"prompt": None, "id": None, "chat_template": "auto"}
    spec = job.spec(model={"path": str(MODEL)}, input={**keys, "continue_final_message": True})
    assert run_job(spec, quiet()).exit_code == 3
    [row] = job.outputs()
    assert row["text"] == "DOW"
    assert job.errors()[0]["code"] == "bad_param"
    with batchgen.LLM(MODEL) as llm:
        [found] = llm.chat([asked, {"role": "assistant", "content": "SHA"}], max_tokens=8, continue_final_message=True)
    assert found["text"] == "DOW"
