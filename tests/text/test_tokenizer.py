"""The folder's own tokenizer and chat template, as transformers uses them, trusted no more than they deserve."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chat_templates import DATED, THINKING, TOOLS
from input_helpers import SPECIAL_TOKENS, ids_of, loaded, write_tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from batchgen.core.errors import ModelError
from batchgen.text.chat import ChatTemplate, ChatTemplateError
from batchgen.text.tokenizer import Tokenizer

SAMPLE = Path(__file__).parents[2] / "sample_data" / "tiny-lfm2"
USER_TURN = [{"role": "user", "content": "The ruler of a kingdom is a"}]
# What LFM2's published tokenizer makes of this chat, and the entries of its vocabulary that take part (bytes as BPE
# spells them: a newline is Ċ, a space is Ġ).
GOLDEN_IDS = [1, 6, 6423, 708, 1098, 30095, 803, 768, 19662, 856, 768, 7, 708, 6, 64015, 708]
GOLDEN_WORDS = {"user": 6423, "Ċ": 708, "The": 1098, "Ġruler": 30095, "Ġof": 803, "Ġa": 768, "Ġkingdom": 19662}
GOLDEN_WORDS |= {"Ġis": 856, "assistant": 64015}
# Letters with what stands before them, digits by threes, punctuation, ends of lines: the kind that LFM2 splits by.
WORDS = r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"


def prompt_of(made: Tokenizer | ChatTemplate, messages: list[dict[str, Any]] = USER_TURN) -> str:
    """The prompt of one chat. Raises what is wrong with it."""
    render = made.render_chats if isinstance(made, Tokenizer) else made.render
    [answer] = render([messages])
    if isinstance(answer, ChatTemplateError):
        raise answer
    return answer


def sample(_: Path) -> Path:
    return SAMPLE


def with_words(folder: Path, model: models.BPE, change: Callable[[tokenizers.Tokenizer], None]) -> Path:
    """The folder of ``write_tokenizer``, its text cut by ``WORDS`` and its model another."""
    path = write_tokenizer(folder) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    split = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.model = model
    change(backend)
    backend.save(str(path))
    return folder


def excerpt(folder: Path) -> Path:
    """A tokenizer of the few words of ``GOLDEN_WORDS``, under their published ids."""
    model = models.BPE({**SPECIAL_TOKENS, **GOLDEN_WORDS}, [], ignore_merges=True)
    return with_words(folder, model, lambda backend: None)


def trained(folder: Path) -> Path:
    """A tokenizer with merges, learnt from a few words."""
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["the plain spaces inside a function return", "def f(): return 1234567", "naïve 東京 東京"] * 4
    return with_words(folder, models.BPE(), lambda backend: backend.train_from_iterator(texts, trainer))


def test_the_published_vocabulary_gives_the_golden_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(excerpt(tmp_path))
    assert tokenizer.encode_batch([prompt_of(tokenizer)], add_special_tokens=False) == [GOLDEN_IDS]
    assert tokenizer.eos_token_ids == (7,)


@pytest.mark.parametrize("folder", [trained, sample])
def test_ids_text_and_chats_agree_with_transformers(folder: Callable[[Path], Path], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = folder(tmp_path)
    ours, theirs = Tokenizer.load(made), transformers.AutoTokenizer.from_pretrained(made)
    texts = ["plain", " spaces  \n\t", "naïve 東京 🙂", "<|im_end|> inside", "1234567", "def f():\n    return 1"]
    for text in texts:
        for special in (True, False):
            [ids] = ours.encode_batch([text], special)
            assert ids == theirs(text, add_special_tokens=special).input_ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    chat = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": texts[2]}]
    assert prompt_of(ours, chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_decoding_skips_special_tokens_and_marks_bytes_that_form_no_character() -> None:
    tokenizer = loaded()
    ids = ids_of(tokenizer, "né🙂")
    assert tokenizer.decode([1, *ids, 7]) == "né🙂"
    assert tokenizer.decode(ids[:2]) == "n\ufffd"
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([10**6]) == ""


def test_no_token_stands_for_more_bytes_than_stated() -> None:
    assert loaded().max_token_bytes == len("<|startoftext|>")


def test_truncation_and_padding_of_the_tokenizer_file_do_not_apply(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    assert [len(ids) for ids in Tokenizer.load(folder).encode_batch(["abcdef", "a"], False)] == [6, 1]


@pytest.mark.parametrize(("named", "expected"), [(7, (7,)), ([2, 7], (2, 7)), (None, (7,)), (3, (3, 7))])
def test_end_tokens_are_those_of_generation_config_and_of_the_tokenizer(
    named: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert Tokenizer.load(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", ["<|im_end|>"]),
        ("{% for m in messages %}[{{ m.content | trim }}] \n<|tool|>{% endfor %}", []),
        ("{% for m in messages %}{{ m.content }} \n<|tool|>x<|im_end|>{% endfor %}", ["<|tool|>"]),
        ("{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if not loop.last }}{% endfor %}", []),
        ("{% for m in messages %}<|im_end|>{{ m.content }}{% endfor %}", []),
        ("{{ messages[-1].content.x.y }}<|im_end|>", []),
    ],
    ids=str,
)
def test_the_token_that_a_template_writes_after_an_answer_is_an_end_token(
    template: str, ends: list[str], tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path, {"<|tool|>": False, "<|tool": False}, eos_token="<|pad|>")
    tokenizer = Tokenizer.load(folder, template=("here", {"default": template}))
    assert {tokenizer.token_id(end) for end in ["<|pad|>", *ends]} == set(tokenizer.eos_token_ids)


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, bos_token={"content": "<B>", "lstrip": False})
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert prompt_of(Tokenizer.load(folder), USER_TURN) == "<B>The ruler of a kingdom is a"


def test_a_folder_without_a_template_says_so() -> None:
    assert loaded(None).chat_template is None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        prompt_of(loaded(None))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", "is not a usable tokenizer"),
        ("tokenizer.json", b"\xff", "is not a usable tokenizer"),
        ("tokenizer.json", None, "no tokenizer.json in"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "expected a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "neither a text nor"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "does not compile"),
        ("chat_template.jinja", b"{{ a", "does not compile"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("generation_config.json", b'{"eos_token_id": "7"}', "neither a token id"),
        ("generation_config.json", b"[" * 100_000, "nested too deeply"),
    ],
)
def test_an_unusable_file_of_the_folder_is_one_line_that_names_it(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.load(folder)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_merges_are_never_left_out_at_random(tmp_path: Path) -> None:
    """BPE dropout is for training: ids must be the same each time."""
    folder = trained(tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    spec["model"]["dropout"] = 0.9
    plain = Tokenizer.load(folder).encode_batch(["the plain function return"] * 20, add_special_tokens=False)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert Tokenizer.load(folder).encode_batch(["the plain function return"] * 20, add_special_tokens=False) == plain


# ---------------------------------------------------------------- variables of a chat template


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (THINKING, {"tools", "enable_thinking", "messages", "add_generation_prompt"}),
        (DATED, {"tools", "custom_tools", "date_string", "strftime_now", "bos_token"}),
        ("{{ 'tools' }}{# tools #} tools {{ messages.tools }}", {"messages"}),
        ("{% macro m(a) %}{{ a }}{{ wide }}{% endmacro %}{{ m(1) }}", {"wide"}),
    ],
)
def test_the_names_of_a_template_are_those_that_it_could_look_at(template: str, names: set[str]) -> None:
    found = ChatTemplate(template, {}).names
    assert names <= found
    assert "tools" in names or "tools" not in found


def test_a_variable_of_one_chat_is_none_of_the_next() -> None:
    template = ChatTemplate("{{ a is defined }} {{ tools is none }}", {})
    chats: list[Any] = [{"messages": [], "a": None, "tools": TOOLS}, {"messages": []}, []]
    assert list(template.render(chats)) == ["True False", "False True", "False True"]


def test_the_time_of_a_template_is_the_one_given_in_its_own_place() -> None:
    given = datetime.fromisoformat("2026-02-03T23:30:00-11:00")
    assert list(ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", {}, given).render([[]])) == ["03 Feb 2026 23:30"]


def test_the_bytes_of_a_token_are_told_where_its_text_hides_them() -> None:
    tokenizer, text = loaded(), " 🙂é"
    assert b"".join(tokenizer.token_bytes(token_id) or b"?" for token_id in ids_of(tokenizer, text)) == text.encode()
    assert tokenizer.token_bytes(10**6) is None
    vocab = {"<unk>": 0, "<0xF0>": 1, "▁a": 2}
    fallback = Tokenizer(tokenizers.Tokenizer(models.BPE(vocab, merges=[], byte_fallback=True)))
    assert [fallback.token_bytes(token_id) for token_id in range(3)] == [None, b"\xf0", None]
