"""Turns of the assistant in a chat, from marks and from rendering, beside the mask of transformers."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import ALTERNATING
from run_helpers import MODEL

from batchgen.text.chat import ChatTemplate, ChatTemplateError
from batchgen.text.tokenizer import Tokenizer
from batchgen.text.turns import Turns, token_ranges

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content is defined and loop.last %}<think>{{ m.reasoning_content }}</think>
{% endif %}{{ m.content }}{% if m.tool_calls is defined %}<call>{{ m.tool_calls }}</call>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LISTS = PLAIN.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")


def chat(*contents: str) -> list[dict[str, Any]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(contents)]


CHATS = {
    "one answer": chat("Hi", "Hello!"),
    "several": chat("a", "b", "c", "ba", "d"),
    "answers alike": chat("7q", "7qz a7q", "x", "a7q", "x", "a7q", "z"),
    "an empty answer": chat("a", "", "b", "c"),
    "white space": chat("a", " \n b \n", "c"),
    "none": chat("a"),
    "tags": chat("a", "<b>bold</b>", "c", "<", "d"),
    "other letters": chat("größe", "naïve 🙂 日本", "b"),
}


def turns_of(source: str, messages: list[dict[str, Any]], **more: Any) -> list[str]:
    template = ChatTemplate(source, {})
    variables = {"messages": messages, **more}
    prompt = next(template.render([variables]))
    assert isinstance(prompt, str)
    return [prompt[start:end] for start, end in Turns(template).of(variables, prompt)]


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_a_turn_is_its_text_and_the_token_that_ends_it_with_marks_and_without(messages: list[dict[str, Any]]) -> None:
    wanted = [f"{message['content']}<|im_end|>" for message in messages if message["role"] == "assistant"]
    assert turns_of(PLAIN, messages) == turns_of(MARKED, messages) == wanted
    lists = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert turns_of(LISTS, lists) == wanted


def test_thoughts_and_calls_are_of_the_turn_where_the_template_shows_them() -> None:
    messages = chat("a", "b", "c", "d")
    messages[1] |= {"reasoning_content": "hidden", "tool_calls": [{"x": 1}]}
    messages[3] |= {"reasoning_content": "shown"}
    assert turns_of(PLAIN, messages) == ["b<call>[{'x': 1}]</call><|im_end|>", "<think>shown</think>\nd<|im_end|>"]


def test_a_final_message_that_is_continued_is_a_turn_without_an_end() -> None:
    for source in (PLAIN, MARKED):
        assert turns_of(source, chat("a", "b b"), continue_final_message=True) == ["b b"]


def test_turns_that_cannot_be_told_are_an_error() -> None:
    changed = "{% set x %}{% generation %}ab{% endgeneration %}{% endset %}{{ x[1:] }}"
    with pytest.raises(ChatTemplateError, match="assistant_mask: the chat template changes the text"):
        turns_of(changed, chat("a", "b"))
    refusing = PLAIN + "{% if messages[1].content == 'a7q' %}{{ raise_exception('not so') }}{% endif %}"
    with pytest.raises(ChatTemplateError, match=r"assistant_mask: .*not so"):
        turns_of(refusing, chat("a", "b"))
    fixed = PLAIN.replace("{{ m.content }}", "{{ m.content if m.content in 'ab' else '' }}")
    with pytest.raises(ChatTemplateError, match="assistant_mask: the chat template does not show other answers"):
        turns_of(fixed, chat("a", "b"))


def test_a_template_that_names_and_trims_the_turns_in_its_own_way() -> None:
    template = ChatTemplate(ALTERNATING, {"bos_token": "<s>"})
    variables = {"messages": chat("a", "  model a ", "b"), "add_generation_prompt": True}
    prompt = next(template.render([variables]))
    assert isinstance(prompt, str)
    [(start, end)] = Turns(template).of(variables, prompt)
    assert prompt[start:end].startswith("model a")


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_the_tokens_are_those_of_transformers(messages: list[dict[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"))
    made = peer.apply_chat_template(
        messages,
        chat_template=MARKED,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        add_generation_prompt=True,
    )
    tokenizer = Tokenizer.load(MODEL, template=("here", {"default": MARKED}))
    prompt = next(tokenizer.render_chats([messages]))
    assert isinstance(prompt, str)
    ranges = tokenizer.turns({"messages": messages}, prompt)
    mask = [int(any(start <= i < end for start, end in ranges)) for i in range(len(made["input_ids"]))]
    assert mask == made["assistant_masks"]


def test_a_token_with_any_character_of_a_turn_is_of_it() -> None:
    offsets = [(0, 2), (2, 4), (4, 4), (4, 6), (6, 7), (6, 7), (7, 9)]
    assert token_ranges(offsets, [(3, 5), (6, 7)]) == ((1, 4), (4, 6))
    assert token_ranges(offsets, [(2, 2), (8, 9)]) == ((1, 1), (6, 7))
    assert token_ranges(offsets, []) == ()
