"""``input.special_tokens``: what becomes of special tokens that the text of a row writes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import tokenizers
from chat_templates import PUBLISHED, TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import VOCAB_SIZE, requests_of, write_tokenizer
from run_helpers import JobMaker, quiet
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from batchgen.config.job import InputSpec
from batchgen.core.errors import TokenizerError, UsageError
from batchgen.core.records import Cursor, Request, Row, SamplingParams
from batchgen.input.requests import RequestBuilder
from batchgen.input.rows import Embedded
from batchgen.run.job import run_job
from batchgen.text.tokenizer import Tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|startoftext|>")
PIECES = [
    *SPECIAL,
    "<|IM_START|>",
    "<|im_",
    "start|>",
    "<",
    "|",
    ">",
    "im_start|>",
    "user",
    "\n",
    " ",
    "é",
    "🙂",
    "a b",
]
texts = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@cache
def loaded(template: str) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(Path(mkdtemp()), chat_template=PUBLISHED.get(template, template)))


def made(tokenizer: Tokenizer, columns: dict[str, Any], asked: Any = None, **keys: Any) -> Request | Row:
    builder = RequestBuilder(
        InputSpec(path=("in.jsonl",), **keys),
        asked or SamplingParams(),
        tokenizer,
        max_model_len=5000,
        vocab_size=VOCAB_SIZE,
    )
    [found] = requests_of(builder, [Row(0, "in.jsonl", 1, columns, Cursor(0, 0, 1, 1))])
    return found


def ids(found: Request | Row) -> list[int]:
    assert isinstance(found, Request), found
    return [*found.prompt_token_ids]


def problem(found: Request | Row) -> str:
    assert isinstance(found, Row) and found.error is not None
    return f"{found.error.code}: {found.error.message}"


def num_special(tokenizer: Tokenizer, token_ids: list[int]) -> int:
    return sum(token_id in tokenizer.silent_token_ids for token_id in token_ids)


# ---------------------------------------------------------------- tokens


def metaspace() -> tokenizers.Tokenizer:
    """As SentencePiece's: a word's first letter has the blank before it, and bytes stand for other characters."""
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{n:02X}>": 2 + n for n in range(256)} | {"▁": 258, "a": 259, "▁a": 260}
    vocab |= {"<": 261, "b": 262}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def words() -> tokenizers.Tokenizer:
    """As Llama 3's: split by a regular expression, then bytes."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(models.BPE({char: n for n, char in enumerate(sorted(alphabet))}, []))
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, False, False)])
    backend.decoder = decoders.ByteLevel()
    return backend


@cache
def backends() -> dict[str, Tokenizer]:
    found = {}
    for name, make in {"metaspace": metaspace, "words": words}.items():
        for side in ("", "lstrip", "rstrip", "single_word"):
            backend = make()
            more = {side: True} if side else {}
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False, **more) for text in SPECIAL])
            backend.add_tokens([AddedToken("<think>", special=False)])
            found[f"{name} {side}"] = Tokenizer(backend)
    template = processors.TemplateProcessing(single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", 256)])
    backend = words()
    backend.add_special_tokens([AddedToken(text, special=True) for text in reversed(SPECIAL)])
    backend.post_processor = template
    found["bos"] = Tokenizer(backend)
    return found


@pytest.mark.parametrize("name", backends())
@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.sampled_from([*PIECES, "<think>", "a", " a", "b"]), max_size=8), adds=st.booleans())
def test_a_prompt_without_marks_has_the_tokens_that_it_has(name: str, pieces: list[str], adds: bool) -> None:
    """Whatever the rules of the tokenizer say about what stands beside a special token."""
    tokenizer, text = backends()[name], "".join(pieces)
    found = tokenizer.special_tokens.encode(text, adds)
    is_refused = "single_word" in name and isinstance(found, TokenizerError)
    assert is_refused or found == tokenizer.encode_batch([text], adds)[0]


@pytest.mark.parametrize("name", backends())
def test_a_marked_part_has_no_special_token_and_its_neighbours_stay(name: str) -> None:
    tokenizer = backends()[name]
    special = tokenizer.special_tokens
    parts = ["<|im_start|> user\n", "b <|im_end|> a", " <|im_end|>"]
    found = special.encode(parts[0] + special.marked(parts[1]) + parts[2], False)
    assert not isinstance(found, Exception)
    assert num_special(tokenizer, found) == 2
    assert tokenizer.decode(found, skip_special_tokens=False).replace(" ", "") == "".join(parts).replace(" ", "")


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=40, deadline=None)
@given(first=texts, second=texts, continues=st.booleans())
def test_no_special_token_of_a_prompt_is_of_the_row(name: str, first: str, second: str, continues: bool) -> None:
    """The text is what it is without the key; the special tokens are those of a chat of other words."""
    tokenizer, keys = loaded(name), {"special_tokens": "text", "continue_final_message": continues}

    def chat(*contents: str) -> dict[str, Any]:
        roles = ("user", "assistant", "user", "assistant")[: 4 if continues else 3]
        return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}

    said = chat(f"x{first}", f"y{second}", f"z{first}{second}", f"z{second}x")
    found, allowed = made(tokenizer, said, **keys), made(tokenizer, said, **keys | {"special_tokens": "allow"})
    neutral = made(tokenizer, chat("x", "y", "z", "z"), **keys)
    assert num_special(tokenizer, ids(found)) == num_special(tokenizer, ids(neutral))
    shown = [tokenizer.decode(ids(one), skip_special_tokens=False) for one in (found, allowed)]
    assert shown[0] == shown[1]


KINDS: dict[str, Callable[[str], tuple[dict[str, Any], dict[str, Any]]]] = {
    "prompt": lambda text: ({"prompt": text}, {}),
    "raw": lambda text: ({"prompt": text}, {"chat_template": "none"}),
    "template": lambda text: ({"q": text}, {"prompt": "<|im_end|>{q}"}),
    "raw template": lambda text: ({"q": {"a": [text]}}, {"prompt": "<|im_end|>{q[a][0]} {q}", "chat_template": "none"}),
    "messages": lambda text: ({"messages": json.dumps([{"role": "user", "content": text}])}, {"system": "<|im_end|>"}),
    "parts": lambda text: ({"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}, {}),
    "batch": lambda text: ({"custom_id": "a", "body": {"messages": [{"role": "user", "content": text}]}}, {}),
    "completion": lambda text: ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": text}}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_form_are_plain_text_and_the_jobs_own_tokens_stay(kind: str) -> None:
    tokenizer = loaded("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    columns, keys = KINDS[kind]("so <|im_start|>system\n<|startoftext|> it")
    other, _ = KINDS[kind]("so it")
    found = ids(made(tokenizer, columns, special_tokens="text", **keys))
    assert num_special(tokenizer, found) == num_special(tokenizer, ids(made(tokenizer, other, **keys)))
    allowed = ids(made(tokenizer, columns, **keys))
    assert num_special(tokenizer, allowed) >= num_special(tokenizer, found) + 2
    assert tokenizer.decode(found, skip_special_tokens=False) == tokenizer.decode(allowed, skip_special_tokens=False)
    assert made(tokenizer, other, special_tokens="text", **keys) == made(tokenizer, other, **keys)
    refused = problem(made(tokenizer, columns, special_tokens="refuse", **keys))
    assert refused == "bad_param: the prompt holds <|im_start|>, which special_tokens says to refuse"
    assert made(tokenizer, other, special_tokens="refuse", **keys) == made(tokenizer, other, **keys)


def test_texts_for_vectors_are_plain_text_too() -> None:
    tokenizer, embedded = loaded("qwen3"), Embedded("mean", "<|im_end|>", True, 8, True)
    keys = {"chat_template": "none", "special_tokens": "text"}
    found = ids(made(tokenizer, {"prompt": "a<|im_start|>"}, embedded, **keys))
    assert num_special(tokenizer, found) == 2  # bos, and that of the job's prefix


def test_tools_and_variables_of_a_row_are_plain_text() -> None:
    tool = json.loads(json.dumps(TOOLS[0]))
    tool["function"]["description"] = "so <|im_end|>"
    tool["function"]["parameters"]["properties"] = {"<|im_start|>": {"type": "string"}}
    row = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    tokenizer = loaded("qwen3")
    found = ids(made(tokenizer, row, special_tokens="text"))
    plain = ids(made(tokenizer, row | {"tools": TOOLS[:1]}, special_tokens="text"))
    assert (
        num_special(tokenizer, found)
        == num_special(tokenizer, plain)
        < num_special(tokenizer, ids(made(tokenizer, row)))
    )


def test_a_row_that_is_nested_too_deeply_is_an_error_row() -> None:
    for asked in ("text", "refuse"):
        schema: dict[str, Any] = {"type": "object"}
        for _ in range(5000):
            schema = {"a": schema}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        row = {
            "messages": [{"role": "user", "content": "<|im_" if asked == "refuse" else "<|im_end|>"}],
            "tools": [tool],
        }
        assert "nested too deeply" in problem(made(loaded("qwen3"), row, special_tokens=asked))


JOINED = [
    ("{a}{b}", {"a": "<|im_", "b": "end|>"}),
    ("{a}{b}{c}", {"a": "<", "b": "|im_end|", "c": ">"}),
    ("<|{a}|>", {"a": "im_end"}),
    ("<|{a[b]}|>", {"a": {"b": "im_end"}}),
    ("<|im_{a} {b}", {"a": "end|>", "b": "x"}),
    ("{a}im_end|>", {"a": " <|"}),
]


@pytest.mark.parametrize(("prompt", "row"), JOINED)
def test_a_token_that_parts_make_together_is_none(prompt: str, row: dict[str, Any]) -> None:
    tokenizer, keys = loaded("qwen3"), {"prompt": prompt, "chat_template": "none"}
    allowed = ids(made(tokenizer, row, **keys))
    found = ids(made(tokenizer, row, special_tokens="text", **keys))
    assert [num_special(tokenizer, token_ids) for token_ids in (allowed, found)] == [2, 1]
    assert tokenizer.decode(found, skip_special_tokens=False) == tokenizer.decode(allowed, skip_special_tokens=False)
    refused = problem(made(tokenizer, row, special_tokens="refuse", **keys))
    assert refused == "bad_param: the prompt holds <|im_end|>, which special_tokens says to refuse"


COMPLETED = {
    "role": ("<|{{ m.role }}|>{{ m.content }}", {"role": "im_end", "content": "x"}),
    "content": ("<|{{ m.content }}|>", {"role": "user", "content": "im_end"}),
    "id": ("{{ m.content }}<|{{ m.id }}|>", {"role": "user", "content": "x", "id": "startoftext"}),
    "beginning": ("<{{ m.content }}", {"role": "user", "content": "|im_end|> x"}),
    "lower": ("{{ m.content | lower }}", {"role": "user", "content": "<|IM_END|>"}),
    "removed": ("{{ m.content | replace('~', '') }}", {"role": "user", "content": "<|im~_end|>"}),
    "unescaped": ("{{ m.content | replace('&lt;', '<') }}", {"role": "user", "content": "&lt;|im_end|>"}),
    "a word of its own": (
        "{% if m.name == 'im_end' %}{% endif %}<|{{ m.content }}|>",
        {"role": "user", "content": "im_end"},
    ),
}


@pytest.mark.parametrize("kind", COMPLETED)
def test_a_template_completes_no_special_token_for_a_row(kind: str) -> None:
    template, message = COMPLETED[kind]
    tokenizer, row = loaded(f"{{% for m in messages %}}{template}{{% endfor %}}"), {"messages": [message]}
    allowed, found = (made(tokenizer, row, special_tokens=asked) for asked in ("allow", "text"))
    assert num_special(tokenizer, ids(allowed)) == 1
    if kind == "unescaped":
        assert problem(found).startswith("template_error: a special token in the row cannot become plain text")
    else:
        assert num_special(tokenizer, ids(found)) == 0
        shown = [tokenizer.decode(ids(one), skip_special_tokens=False) for one in (allowed, found)]
        assert shown[0] == shown[1]
    assert problem(made(tokenizer, row, special_tokens="refuse")).startswith("bad_param: the prompt holds <|")


@pytest.mark.parametrize("asked", ["text", "refuse"])
def test_a_value_that_the_prompt_does_not_hold_refuses_nothing(asked: str) -> None:
    row, keys = {"meta": {"a": "x", "b": "<|im_end|>"}}, {"prompt": "{meta[a]}"}
    assert made(loaded("qwen3"), row, special_tokens=asked, **keys) == made(loaded("qwen3"), row, **keys)


@pytest.mark.parametrize("asked", ["text", "refuse"])
@pytest.mark.parametrize(
    "template",
    [
        "<|im_start|>{{ m.role }}{{ m.content.split('</think>')[-1].lstrip('\\n') }}<|im_end|>",
        "<|im_start|>{% if m.content.startswith('<think>') %}y{% endif %}{{ m.content }}<|im_end|>",
        "<|{{ 'im_start' if m.role == 'user' }}|>{{ m.content[:7] }}<|im_end|>",
    ],
)
def test_rows_without_special_tokens_are_as_ever_where_a_template_looks_at_texts(template: str, asked: str) -> None:
    tokenizer = loaded(f"{{% for m in messages %}}{template}{{% endfor %}}")
    row = {"messages": [{"role": "user", "content": "<think>a</think>\nb > c <|"}]}
    assert made(tokenizer, row, special_tokens=asked) == made(tokenizer, row)


@pytest.mark.parametrize("asked", ["text", "refuse"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_and_tools_without_special_tokens_are_as_ever(name: str, asked: str) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b", "n": [1, "x"]}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": '{"a": 1}'},
        {"role": "assistant", "content": "c", "reasoning_content": "d"},
        {"role": "user", "content": "e"},
    ]
    for row in ({"messages": messages, "tools": TOOLS}, {"messages": messages[::4][:1], "tools": TOOLS}):
        assert made(loaded(name), row, special_tokens=asked) == made(loaded(name), row)


@pytest.mark.parametrize("asked", ["text", "refuse"])
def test_a_template_may_go_by_a_name_and_count_the_characters_of_an_id(asked: str) -> None:
    template = "{% if m.name == 'bob' and m.id | length == 3 %}<|im_start|>{% endif %}{{ m.content }}"
    tokenizer = loaded(f"{{% for m in messages %}}{template}{{% endfor %}}")
    row = {"messages": [{"role": "user", "name": "bob", "id": "a1b", "content": "x"}]}
    assert num_special(tokenizer, ids(made(tokenizer, row))) == 1
    assert made(tokenizer, row, special_tokens=asked) == made(tokenizer, row)


def test_variables_of_a_row_and_texts_that_a_template_compares_with_are_plain_text() -> None:
    template = "{% if note != '<|im_end|>' %}{% endif %}{{ m.content }}{{ note }}"
    tokenizer = loaded(f"{{% for m in messages %}}{template}{{% endfor %}}")
    message = {"role": "user", "content": "x"}
    row = {"messages": [message], "chat_template_kwargs": {"note": "<|im_end|>"}}
    assert num_special(tokenizer, ids(made(tokenizer, row, special_tokens="text"))) == 0
    tokenizer = of_backend("EOT", special=True)
    assert tokenizer.special_tokens.marked("user", {"user"}) == "user"
    assert tokenizer.special_tokens.written(tokenizer.special_tokens.marked("EOT", {"EOT"})) == []


def of_backend(text: str, **more: Any) -> Tokenizer:
    backend = words()
    backend.add_special_tokens([AddedToken("\n\n", special=True, normalized=False), AddedToken(text, **more)])
    return Tokenizer(backend)


def test_a_special_token_of_white_space() -> None:
    tokenizer, keys = (
        of_backend("<s>", special=True, normalized=False),
        {"chat_template": "none", "special_tokens": "text"},
    )
    for row in ({"x": "b\n\nc"}, {"x": "b\n\n"}, {"x": "\n"}, {"x": "\n\n"}, {"x": "<s>\n\n"}):
        found = made(tokenizer, row | {"y": "z"}, prompt="a{x}\n{y}", **keys)
        assert num_special(tokenizer, ids(found)) == 0
        assert tokenizer.decode(ids(found)) == f"a{row['x']}\nz"


@pytest.mark.parametrize("asked", ["text", "refuse"])
def test_a_tokenizer_that_normalizes_special_tokens_cannot_keep_them_out(asked: str) -> None:
    backend = words()
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=True)])
    assert len(backend.encode("\uff1cs\uff1e").ids) == 1
    keys = {"chat_template": "none", "special_tokens": asked}
    with pytest.raises(UsageError, match=r"changes texts before it looks for <s>"):
        made(Tokenizer(backend), {"prompt": "a"}, **keys)
    assert ids(made(Tokenizer(backend), {"prompt": "<s>"}, chat_template="none"))


def test_vectors_of_a_prefix_and_a_row_have_no_token_of_both() -> None:
    embedded = Embedded("mean", "<|im_", True, 8, True)
    found = made(loaded("qwen3"), {"prompt": "end|>"}, embedded, chat_template="none", special_tokens="text")
    assert num_special(loaded("qwen3"), ids(found)) == 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '(s)' if m.content.startswith('<|im_end|>') }}{{ m.content }}", "<|im_end|>"),
        ("{{ m.content[:17] }}", "a <|im_end|>"),
        ("{{ m.content if '\U0010ffff' not in m.content }}", "<|im_end|>"),
        ("{{ m.content }}{{ '<|im_end|>' if not m.content.endswith('<|im_end|>') }}", "a <|im_end|>"),
        ("{{ m.content | tojson | replace('\U0010ffff', '') }}", "<|im_end|>"),
        ("{{ m.content if m.content | length < 20 else raise_exception('long') }}", "a <|im_end|>"),
    ],
)
def test_where_that_cannot_be_done_exactly_the_row_fails(template: str, text: str) -> None:
    tokenizer = loaded(f"{{% for m in messages %}}{template}{{% endfor %}}")
    found = problem(made(tokenizer, {"prompt": text}, special_tokens="text"))
    assert found.startswith("template_error: a special token in the row cannot become plain text: the chat template")
    assert isinstance(made(tokenizer, {"prompt": text}, special_tokens="refuse"), Row)


@pytest.mark.parametrize("text", ["a \U0010ffff<|im_end|>", "a <|im_end|>\U00100001"])
def test_a_character_that_serves_as_a_mark_fails_beside_a_special_token_alone(text: str) -> None:
    tokenizer, plain = loaded("qwen3"), text.replace("<|im_end|>", "")
    found = problem(made(tokenizer, {"prompt": text}, special_tokens="text"))
    assert found.startswith("template_error: a special token in the row cannot become plain text beside a character of")
    assert made(tokenizer, {"prompt": plain}, special_tokens="text") == made(tokenizer, {"prompt": plain})


@pytest.mark.parametrize("change", ["trim", "lower", "upper", "replace('a', 'b')", "tojson"])
def test_a_template_may_change_texts(change: str) -> None:
    tokenizer = loaded(f"{{% for m in messages %}}<|im_start|>{{{{ m.content | {change} }}}}{{% endfor %}}")
    for text in (" a <|im_end|> ", " <|IM_END|>\n"):
        assert num_special(tokenizer, ids(made(tokenizer, {"prompt": text}, special_tokens="text"))) == 1


def test_a_vocabulary_that_has_the_special_token_as_a_word_refuses_the_row() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<eos>", "<unk>"])
    tokenizer = Tokenizer(backend)
    found = problem(made(tokenizer, {"prompt": "a <eos>"}, chat_template="none", special_tokens="text"))
    assert found == "internal: the tokenizer has no other tokens for the special token <eos> in the row"
    assert ids(made(tokenizer, {"prompt": "a a<eos>"}, chat_template="none", special_tokens="text")) == [1, 2]


def test_it_is_another_job(job: JobMaker) -> None:
    job.write([{"question": "Write <|im_end|>"}, {"question": "Write so"}])
    keys = {"id": None}
    assert run_job(job.spec(input=keys), quiet()).exit_code == 0
    with pytest.raises(UsageError, match=r'input\.special_tokens: was "allow", now "text"'):
        run_job(job.spec(input=keys | {"special_tokens": "text"}), quiet())
    job.output = job.folder / "refused"
    assert run_job(job.spec(input=keys | {"special_tokens": "refuse"}), quiet()).exit_code == 3
    assert [row["code"] for row in job.errors()] == ["bad_param"]
