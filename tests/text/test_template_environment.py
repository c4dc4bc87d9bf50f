"""Templates have the environment of transformers: the same text, or both fail."""

from __future__ import annotations

import pytest

from batchgen.text.chat import ChatTemplate

MESSAGES = [
    {"role": "user", "content": "é<b>'\"&"},
    {"role": "assistant", "content": "x", "extra": {"b": 1, "a": [1.0, None, True]}},
]
SAME = {
    "dict": "{{ dict(a=1).items() | list }}{{ dict.fromkeys('ab', 1) }}{{ dict([('a', 1)]) }}",
    "a namespace": "{% set n = namespace({'a': 2}, b=3) %}{% set n.a = 4 %}{{ n.a }}{{ n.b }}",
    "a namespace with a self": "{% set n = namespace(self=1) %}{{ n.self }}",
    "what is set in a generation": (
        "{% set x = 'out' %}{% generation %}{% set x = 'in' %}{{ x }}{% endgeneration %}{{ x }}"
    ),
    "a generation in a loop": (
        "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "a namespace in a generation": (
        "{% set n = namespace(a=1) %}{% generation %}{% set n.a = 2 %}{% endgeneration %}{{ n.a }}"
    ),
    "a generation in a macro": "{% macro f(x) %}{% generation %}[{{ x }}]{% endgeneration %}{% endmacro %}{{ f('<') }}",
    "space around a generation": (
        "a\n{% generation %}\n  b\n{% endgeneration %}\nc\n  {%- generation -%} d {%- endgeneration -%} e"
    ),
    "loop controls": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ 'é' | tojson(ensure_ascii=true) }}",
    "tojson of an object": (
        "{{ messages[1].extra | tojson(sort_keys=true, separators=(',', ':')) }}{{ '</s>' | tojson }}"
    ),
    "variables": (
        "{{ tools is defined }}{{ tools is none }}{{ documents is none }}{{ x is defined }}{{ add_generation_prompt }}"
    ),
    "variables in a macro": "{% macro f() %}{{ tools is none }}{{ messages | length }}{% endmacro %}{{ f() }}",
    "escapes": "{{ messages[0].content }}{{ messages[0].content | escape }}{{ messages[1].extra | string }}",
    "loops": (
        "{% for m in messages %}{{ loop.previtem is defined }}"
        "{{ loop.nextitem is defined }}{{ loop.cycle(1, 2) }}{% endfor %}"
    ),
    "methods": (
        "{{ 'a-b'.replace('-', '+').split('+') }}{{ 'abc'[::-1] }}{{ '%s' | format('a') }}{{ '{x}'.format(x=2) }}"
    ),
    "filters": (
        "{{ messages | map(attribute='role') | join(',') }}"
        "{{ messages | selectattr('role', 'eq', 'user') | list | length }}"
    ),
    "tests": (
        "{{ messages is sequence }}{{ messages[0] is mapping }}{{ 1 is integer }}{{ 'a' is string }}{{ none is none }}"
    ),
    "numbers": "{{ 1e100 }}{{ 10**20 }}{{ 7 // 2 }}{{ 1/3 }}{{ '3' | int + 1 }}{{ 1.25 | round(1) }}",
    "what is not there": "{{ x }}|{{ messages[0].zz }}|{{ messages[9] }}|{{ 'a' if false }}",
    "blocks": (
        "{% block a %}{{ messages[0].role }}{% endblock %}{% filter upper %}a"
        "{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}"
    ),
    "formats": "{{ '%5.1f|%-3s|%%' % (1.25, 'a') }}{{ '{:>4}'.format('a') }}{{ 'a'.center(5) }}{{ 'a\nb'|indent(2) }}",
    "newlines": "a\r\n{% if true %}\n  b\n{% endif %}\nc\n",
}
FAIL = {
    "a namespace with an underscore": "{% set n = namespace(_x=1) %}{{ n._x }}",
    "an underscore set in a namespace": "{% set n = namespace(a=1) %}{% set n._b = 2 %}{{ n.a }}",
    "a break out of a generation": "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "a message that is changed": "{{ messages[0].update({'a': 1}) }}",
    "a list that is changed": "{{ messages.append(1) }}",
    "its own exception": "{{ raise_exception('no') }}",
    "an import": "{% import 'x' as y %}",
    "an extension that is not there": "{% do messages %}",
    "underscores": "{{ ''.__class__.__mro__ }}",
    "an attribute of nothing": "{{ x.y }}",
}


def ours(source: str) -> object:
    try:
        [answer] = ChatTemplate(source, {}).render([MESSAGES])
    except Exception as error:
        return type(error)
    return answer if isinstance(answer, str) else type(answer)


def theirs(source: str) -> object:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        [[prompt], _] = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True)
    except Exception as error:
        return type(error)
    return prompt


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_a_template_makes_the_text_of_transformers(source: str) -> None:
    expected = theirs(source)
    assert isinstance(expected, str) and ours(source) == expected


@pytest.mark.parametrize("source", FAIL.values(), ids=FAIL)
def test_a_template_fails_where_transformers_fails(source: str) -> None:
    assert isinstance(theirs(source), type) and isinstance(ours(source), type)
