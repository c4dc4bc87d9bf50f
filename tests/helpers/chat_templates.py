"""Chat templates in the manner of published ones: what they branch on and print, in words of our own."""

from __future__ import annotations

from datetime import datetime, tzinfo

import pytest

# As Qwen3's: tools in the system turn, thinking on unless it is switched off, earlier thoughts left out.
THINKING = r"""
{%- set at = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set at.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '## Functions\nEach line is one:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\nTo call one, write <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- set content = message.content %}
        {%- if message.reasoning_content is defined and message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > at.last_user and thoughts %}
            {{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

# As Llama 3.2's: bos, a date in the system turn, tools in the first user turn unless asked otherwise.
DATED = r"""
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|im_start|>system\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Known until: December 2023\nThe date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "Functions at hand:\n\n" }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{%- endif %}
{{- system + "<|im_end|>" }}
{%- if tools_in_user_message and tools is not none %}
    {%- if messages | length == 0 %}{{- raise_exception("No user turn to put the functions in") }}{%- endif %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- "<|im_start|>user\nAnswer with a call of one of these, as JSON:\n\n" }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first + "<|im_end|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("One call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\n{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson }}
        {{- '}<|im_end|>' }}
    {%- else %}
        {{- "<|im_start|>ipython\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

# As LFM2's, which names the delimiters of its calls nowhere, and Mistral's.
_TURNS = "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
SILENT = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}" + _TURNS + "<|im_start|>assistant\n"
LISTED = (
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{# [TOOL_CALLS] #}" + _TURNS + "<|im_start|>assistant\n"
)

# As LFM2's first: tools beside the first system turn, whatever role as it is, and no word of calls.
LISTING = r"""
{{- bos_token -}}
{%- set opening = "" -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set opening = messages[0]["content"] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if opening or tools -%}
    {{- "<|im_start|>system\n" + opening -}}
    {%- if tools -%}
        {{- ("\n" if opening else "") + "Functions: <|tools|>[" -}}
        {%- for tool in tools -%}
            {{- tool if tool is string else tool | tojson -}}{{- ", " if not loop.last -}}
        {%- endfor -%}
        {{- "]<|/tools|>" -}}
    {%- endif -%}
    {{- "<|im_end|>\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set text = message["content"] -%}
    {%- if text is not string -%}{%- set text = text | tojson -%}{%- endif -%}
    {%- if message["role"] == "tool" -%}{%- set text = "<|answer|>" + text + "<|/answer|>" -%}{%- endif -%}
    {{- "<|im_start|>" + message["role"] + "\n" + text + "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""

# As LFM2.5's: calls as Python writes them, where they are defined, and thoughts of earlier answers cut out of the text.
PYTHONIC = r"""
{{- bos_token -}}
{%- set keeps = keep_past_thinking | default(false) -%}
{%- macro literal(value) -%}
    {%- if value is string -%}{{- "'" + value + "'" -}}
    {%- elif value is mapping or value is iterable -%}{{- value | tojson -}}
    {%- else -%}{{- value | string -}}{%- endif -%}
{%- endmacro -%}
{%- macro call(one) -%}
    {{- one.name -}}(
    {%- for key, value in one.arguments.items() -%}
        {{- key -}}={{- literal(value) -}}{{- ", " if not loop.last -}}
    {%- endfor -%})
{%- endmacro -%}
{%- set at = namespace(opening="", last=-1) -%}
{%- if messages[0].role == "system" -%}
    {%- set at.opening = messages[0].content if messages[0].content is string else messages[0].content | tojson -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set at.opening = at.opening + ("\n" if at.opening else "") + "Functions: " + tools | tojson -%}
{%- endif -%}
{%- if at.opening -%}{{- "<|im_start|>system\n" + at.opening + "<|im_end|>\n" -}}{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}{%- set at.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\n" -}}
    {%- set text = message.content -%}
    {%- if text is not string -%}{%- set text = text | tojson -%}{%- endif -%}
    {%- if message.role == "assistant" and not keeps and loop.index0 != at.last and "</think>" in text -%}
        {%- set text = text.split("</think>")[-1] | trim -%}
    {%- endif -%}
    {{- text -}}
    {%- if message.tool_calls is defined -%}
        {{- "<|calls|>[" -}}
        {%- for one in message.tool_calls -%}{{- call(one.function) -}}{{- ", " if not loop.last -}}{%- endfor -%}
        {{- "]<|/calls|>" -}}
    {%- endif -%}
    {{- "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""

# As SmolLM3's: the date and the mode in the system turn, the answer marked for training, and no word of calls.
MODED = r"""
{%- set thinks = enable_thinking | default(true) -%}
{%- set own = "" -%}
{%- if messages[0].role == "system" -%}
    {%- set own = messages[0].content -%}
    {%- if "/no_think" in own -%}{%- set thinks = false -%}{%- endif -%}
    {%- set own = own.replace("/no_think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\nToday: " + strftime_now("%d %B %Y") + "\nMode: " -}}
{{- ("/think" if thinks else "/no_think") + "\n\n" + own + "\n" -}}
{%- if xml_tools or tools -%}
    {{- "Functions:\n<tools>\n" -}}
    {%- for tool in xml_tools or tools -%}{{- tool.function | string + "\n" -}}{%- endfor -%}
    {{- "</tools>\n" -}}
{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- for message in messages -%}
    {%- set text = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{- "<|im_start|>user\n" + text + "<|im_end|>\n" -}}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {{- "<|im_start|>assistant\n" + ("" if thinks else "<think>\n\n</think>\n") -}}
        {{- text.lstrip("\n") + "<|im_end|>\n" -}}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}
        {{- "<|im_start|>user\n" + text + "<|im_end|>\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\n" + ("" if thinks else "<think>\n\n</think>\n") -}}
{%- endif -%}
"""

# As Gemma 3's: the system turn before the first user turn, turns that alternate, parts of a content taken as they are.
ALTERNATING = r"""
{{- bos_token -}}
{%- set before = "" -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set before = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{%- set before = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception("Turns of user and assistant must alternate") -}}
    {%- endif -%}
    {{- '<|im_start|>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' -}}
    {{- before if loop.first -}}
    {%- if message['content'] is string -%}
        {{- message['content'] | trim -}}
    {%- elif message['content'] is iterable -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- raise_exception("Not a content") -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>model\n' -}}{%- endif -%}
"""

PUBLISHED = {
    "lfm2": LISTING,
    "lfm2.5": PYTHONIC,
    "qwen3": THINKING,
    "llama3": DATED,
    "smollm3": MODED,
    "gemma3": ALTERNATING,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city, é < 2 & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]

_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}}
CHATS = [
    [{"role": "user", "content": "Hi 東京 🙂"}],
    [{"role": "system", "content": " Be terse. "}, {"role": "user", "content": "  Hi\n"}],
    [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nFour.\n</think>\n\n4"},
        {"role": "user", "content": "And 3 + 3?"},
    ],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "A call.", "tool_calls": [_CALL]},
        {"role": "tool", "content": '{"sky": "blue"}'},
        {"role": "tool", "content": "12°"},
    ],
]
VARIABLES = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS[:1], "enable_thinking": False, "date_string": "1 May 2025"},
    {"enable_thinking": False},
    {"enable_thinking": True, "tools_in_user_message": False, "tools": TOOLS},
    {"custom_tools": TOOLS, "date_string": "today"},
]


def fix_date(date: datetime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it that date in the templates of transformers."""
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return date

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
