"""Tool calls read from texts of every family, whole, malformed and hostile."""

from __future__ import annotations

import json
from keyword import iskeyword
from pathlib import Path
from typing import Any

import pytest
from chat_templates import DATED, LISTED, SILENT, THINKING
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import CHAT_TEMPLATE, ids_of, write_tokenizer

from batchgen.text.tokenizer import Tokenizer
from batchgen.text.tool_calls import FORMATS, ToolCalls, offered_tools, tool_format

FORMS = {form.family: form for form in FORMATS}
MARKERS = {form.family: form.markers[0] for form in FORMATS}
START, END = FORMS["LFM2"].markers
SPECIAL = {  # what vocabularies of the family hold, and whether decoding skips it
    "LFM2": {START: True, END: True},
    "Mistral": {"[TOOL_CALLS]": True, "[ARGS]": True, "[CALL_ID]": True},
    "Hermes": {"<tool_call>": False, "</tool_call>": False},
    "Llama 3": {"<|python_tag|>": True},
}


def tokenizer_of(folder: Path, template: str = CHAT_TEMPLATE, *families: str) -> Tokenizer:
    """A tokenizer of bytes with the tokens of some families."""
    added = {text: skip for name in families for text, skip in SPECIAL[name].items()}
    return Tokenizer.load(write_tokenizer(folder, added, chat_template=template))


def parsed(family: str, text: str, offered: Any = None) -> Any:
    """The calls in a text, each as a name and arguments, and the rest; None for malformed ones."""
    try:
        calls, rest = FORMS[family].parse(text, offered)
    except ValueError:
        return None
    return [(call["name"], call["arguments"]) for call in calls], rest


@pytest.mark.parametrize(
    ("family", "text", "calls", "rest"),
    [
        ("LFM2", f'{START}[now()]{END}', [("now", {})], ""),
        # public bugs of other parsers: dotted names, JSON's words in Python's notation
        ("LFM2", f'{START}[a.b.c(x=1)]{END}', [("a.b.c", {"x": 1})], ""),
        ("LFM2", f"{START}[f(a=true, b=false, c=null, d=[True, None])]{END}",
         [("f", {"a": True, "b": False, "c": None, "d": [True, None]})], ""),
        ("LFM2", f'I look. {START}[f(a="]"), g(b=(1, -2.5e1,), c=())]{END} Wait.',
         [("f", {"a": "]"}), ("g", {"b": [1, -25.0], "c": []})], "I look.\nWait."),
        ("LFM2", f"""{START}[f(a='it\\'s "x"\\n\\u00e9\\ud83d\\ude00\\d', b={{"k": {{}}}}, c='''a'b''')]""",
         [("f", {"a": 'it\'s "x"\né😀\\d', "b": {"k": {}}, "c": "a'b"})], ""),
        ("LFM2", f'{START}[{{"name": "f", "arguments": {{"a": 1}}}}]{END}', [("f", {"a": 1})], ""),
        ("LFM2", f"{START}f(a=1), g(){END}", [("f", {"a": 1}), ("g", {})], ""),
        # names that Python does not have, digits that are no number, a line break in a text
        ("LFM2", f'{START}[get-weather(from="en", class=1, zip=01234, hex=-0xff)]{END}',
         [("get-weather", {"from": "en", "class": 1, "zip": "01234", "hex": -255})], ""),
        ("LFM2", f"{START}[f(a='x\ny', b=\"it's\\\\\")]{END}", [("f", {"a": "x\ny", "b": "it's\\"})], ""),
        ("LFM2", f'{START}[f(a="{END}")]{END}', [("f", {"a": END})], ""),
        ("Hermes",
         '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>\n<tool_call>{"name": "g"}',
         [("f", {"a": "</tool_call>"}), ("g", {})], ""),  # a closing one may be missing at the end
        ("Hermes", 'So: <tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})], "So:"),
        ("Llama 3", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
         [("f", {"a": 1}), ("g", {})], ""),
        ("Llama 3", 'Yes <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', [("f", {})], "Yes"),
        ("Mistral", 'A[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
         [("f", {"a": 1}), ("g", {})], "A"),
        ("Mistral", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]1[ARGS]{}',
         [("f", {"a": "[TOOL_CALLS]"}), ("g", {})], ""),
    ],
)  # fmt: skip
def test_calls_and_the_rest_of_the_text(family: str, text: str, calls: Any, rest: str) -> None:
    assert parsed(family, text) == (calls, rest)


OFFERED = offered_tools(
    [
        {
            "type": "function",
            "function": {"name": "find it", "parameters": {"properties": {"a b": {}, "n": {"type": "integer"}}}},
        },
        {"name": "now"},
    ]
)


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        (f"{START}[find it(a b=1, n=007)]{END}", [("find it", {"a b": 1, "n": 7})], ""),
        ("[now()]", [("now", {})], ""),
        (f"So: [find it(n=1), now()]{END} Wait.", [("find it", {"n": 1}), ("now", {})], "So:\nWait."),
        ("See [later()] or now().", [], "See [later()] or now()."),
    ],
)
def test_the_tools_that_are_offered_tell_names_types_and_starts_of_calls(text: str, calls: Any, rest: str) -> None:
    assert parsed("LFM2", text, OFFERED) == (calls, rest)


def test_a_list_of_calls_without_markers_that_is_cut_off_is_malformed() -> None:
    assert parsed("LFM2", "[now(", OFFERED) is None


@pytest.mark.parametrize("tools", [None, "", "{", 5, [5, {"name": 5}], [{"function": {"name": "f", "parameters": 5}}]])
def test_tools_that_are_none_offer_nothing_that_fails(tools: object) -> None:
    assert all(not types for types in offered_tools(tools).values())


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("text", ["", "No call.", '{"name": "Bob", "age": 3}', "[f(a=1)]", "```python\nf(x)\n```"])
def test_other_answers_are_left_alone(family: str, text: str) -> None:
    assert parsed(family, text) == ([], text)


@pytest.mark.parametrize(
    "body",
    ["__import__('os').system('id')", "[f(a=__import__('os').system('id'))]", "[f(a=1+1)]", "[f(*a)]", "[f(**a)]",
     "[f(a=g(1))]", "[f(a=[x for x in y])]", "[f(a=lambda: 1)]", '[f(a=f"{x}")]', "[f(1)]", "[f(a=1, a=2)]", "[f(a=x)]",
     "[f(a={1})]", "[f(a={1: 2, '1': 2})]", "[f(a=1e999)]", "[f(a=1j)]", "[f(a='\\ud800')]", "[f(a='\\Uffffffff')]",
     "[f(a=b'x')]", "[f(a=set())]", "[f(a=NaN)]", "[f(a=...)]", "[f(a='x')", "[f(a='x)]", "[f(a=1)] and so on", "[f(",
     "",      '{"name": 1}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": {"a": NaN}}',
     '{"name": "", "arguments": {}}'],
)  # fmt: skip
def test_what_is_no_list_of_calls_with_literals_is_malformed(body: str) -> None:
    assert parsed("LFM2", f"{START}{body}{END}") is None


@pytest.mark.parametrize(
    "unit",
    ["[", "(", "{", "[{", "[(", "-", "9", " ", "\\", "a", "a.", "not ", "'''a", "f(", "f(,",
     '{"a":', "\n", "1,", '"', "a="],
)  # fmt: skip
@pytest.mark.parametrize("head", ["", "[f(a=", "[f(a='", '[f(a="""', '{"name": ', '[{"name": "f", "arguments": {"a": '])
def test_ten_megabytes_of_anything_end_as_text(unit: str, head: str) -> None:
    size = 10_000_000 if unit in "[({" else 50_000
    for family, marker in MARKERS.items():
        assert parsed(family, marker + head + unit * (size // len(unit))) is None


def test_nesting_and_digits_have_limits() -> None:
    for depth, is_whole in ((60, True), (200, False)):
        found = parsed("LFM2", f"{START}[f(a={'[' * depth}{']' * depth})]{END}")
        assert (found is not None) == is_whole
    assert parsed("LFM2", f"{START}[f(a={'9' * 5000})]{END}") is None
    assert parsed("LFM2", f"{START}[f(a='{'x' * 300_000}')]{END}") is None
    assert parsed("LFM2", f"{START}[f(a={'9' * 4000})]{END}")[0][0][1]["a"] == int("9" * 4000)
    assert parsed("Hermes", '<tool_call>{"name": "f", "arguments": {"a": %s}}' % ("9" * 5000)) is None


NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True).filter(lambda name: not iskeyword(name))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_what_is_written_in_a_familys_way_is_read_again(arguments: dict[str, Any]) -> None:
    for show in (repr, json.dumps):  # a Pythonic call, its literals Python's or JSON's
        pairs = ", ".join(f"{name}={show(value)}" for name, value in arguments.items())
        assert parsed("LFM2", f"{START}[f({pairs})]{END}") == ([("f", arguments)], "")
    text = json.dumps(arguments)
    for family, whole in {
        "Hermes": f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>',
        "Llama 3": f'{{"name": "f", "parameters": {text}}}',
        "Mistral": f"[TOOL_CALLS]f[ARGS]{text}",
    }.items():
        assert parsed(family, whole) == ([("f", arguments)], "")


@given(st.text(alphabet="[](){}=,:'\"\\ntrue1.-e \n", max_size=60))
def test_no_text_is_anything_but_calls_or_malformed(text: str) -> None:
    for family, marker in MARKERS.items():
        for found in (parsed(family, marker + text), parsed(family, f"{marker}[f(a={text}")):
            calls = [] if found is None else found[0]
            assert all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in calls)


@pytest.mark.parametrize(
    ("template", "vocabulary", "family"),
    [
        (SILENT, ("LFM2",), "LFM2"),  # the template does not show the delimiters
        (THINKING, (), "Hermes"),
        (THINKING, ("Llama 3",), "Hermes"),  # of Nous Research, on Llama's vocabulary
        (CHAT_TEMPLATE, ("Hermes",), "Hermes"),
        (DATED, (), "Llama 3"),
        (DATED, ("Llama 3",), "Llama 3"),
        (LISTED, ("Mistral",), "Mistral"),
        (CHAT_TEMPLATE, (), None),
    ],
)
def test_the_family_is_known_by_template_or_vocabulary(
    tmp_path: Path, template: str, vocabulary: tuple[str, ...], family: str | None
) -> None:
    form = tool_format(tokenizer_of(tmp_path, template, *vocabulary))
    assert (form and form.family) == family


def test_markers_are_found_where_decoding_skips_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, SILENT, "LFM2")
    ids = ids_of(tokenizer, f'{START}[f(a="é")]{END}Done.<|im_end|>')
    assert tokenizer.decode(ids) == '[f(a="é")]Done.'
    tools = ToolCalls(tokenizer, FORMS["LFM2"])
    assert tools.read(tools.tokenizer.decode(ids)) == ([{"name": "f", "arguments": {"a": "é"}}], "Done.", True)
    assert tokenizer.decode(ids) == '[f(a="é")]Done.'
