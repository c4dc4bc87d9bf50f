"""Grammars: keeps generated text inside a JSON schema, a regex, a list of choices or a Lark grammar, with llguidance.

Allowed and forced tokens depend on grammar and text alone, so guided tokens do not depend on the batch either.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from batchgen.core.errors import TokenizerError
from batchgen.core.machine import num_usable_cpus
from batchgen.core.structured import parsed
from batchgen.core.units import shown
from batchgen.text.grammar_source import GrammarError, explained, library, source
from batchgen.text.stop_strings import StopStrings, ends_in
from batchgen.text.tokenizer import Tokenizer, reason

_MAX_COMPILED = 512  # grammars kept, of
_MAX_CHARS = 4 << 20  # characters in all: the lexer and parser of a schema take some 60 bytes for each
_MIN_PARALLEL = 8  # grammars in a step from which threads make its masks: 0.1 ms to start them, 0.05 ms a mask
# What one mask may cost; see ``LLParserLimits``: about 50 ms of lexing and 10 ms of parsing, 40 MB of lexer states.
_LIMITS = {"step_lexer_fuel": 500_000, "step_max_items": 3_000, "max_lexer_states": 20_000}
# Sets of tokens that a mask takes over whole: white space, and text inside a JSON string of a few lengths. Between two
# of the lengths tokens are tried one by one: with llguidance's own, 10 and 30, bounded strings took twice the time.
_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_TEXT}{{1,{length}}}" for length in (2, 4, 8, 16, 30)), f"{_TEXT}+"]
_Found = TypeVar("_Found")


class Grammars:
    """The compiled grammars of one model, each made on first use; one thread may check rows while another runs."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < tokenizer.vocab_size)
        self._vocabulary: Any = None
        self._executor: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()
        self._guessed_ends: tuple[int, ...] = ()  # what the library takes for end tokens of a model without any

    def check(self, text: str) -> None:
        """Compile what a canonical text (see ``core.structured``) asks for. Raises GrammarError."""
        self._prototype(text)

    def begin(self, text: str, prompt_token_ids: Sequence[int]) -> Guide:
        """A guide for the answer to a prompt; with ``after`` it waits for that marker, unless the prompt ends in it."""
        marker = parsed(text).get("after", "")
        is_open = not marker or ends_in(self.tokenizer, prompt_token_ids, marker)
        return Guide(self, text, "" if is_open else marker)

    def fill(self, guides: Sequence[Guide], bits: np.ndarray) -> None:
        """Write the tokens that may come next into ``bits``, int32 [num_guides, words], a bit per token.

        A guide that fails gets an ``error``, and all its bits are set.
        """
        at, width = bits.ctypes.data, bits.strides[0]
        waiting = [(guide, row) for row, guide in enumerate(guides) if guide.forced is None]
        if len({guide.text for guide, _ in waiting}) >= _MIN_PARALLEL:  # guides of one text share a lexer
            self._fill_together([(guide.matcher, row) for guide, row in waiting], at, width, len(guides))
        else:
            for guide, row in waiting:
                guide.matcher.unsafe_compute_mask_ptr(at + row * width, width)
        words = bits.view(np.uint32)
        for row, guide in enumerate(guides):
            if guide.forced is not None:
                words[row] = 0
                words[row, guide.forced // 32] = 1 << guide.forced % 32
                continue
            if guide.matcher.is_error():
                guide.attempt(lambda matcher, at=at + row * width: matcher.unsafe_compute_mask_ptr(at, width))  # type: ignore[misc]
            for token_id in self._guessed_ends:
                words[row, token_id // 32] &= ~np.uint32(1 << token_id % 32)
            if not guide.error and not words[row].any():
                guide.error = "no token of the vocabulary continues the text"
            if guide.error:
                bits[row] = -1

    def _fill_together(self, matchers: list[tuple[Any, int]], at: int, width: int, num_rows: int) -> None:
        if self._executor is None:
            self._executor = library().LLExecutor(min(32, num_usable_cpus()))
        self._executor.unsafe_compute_mask_ptr(matchers, at, width, num_rows)

    def copy(self, text: str) -> Any:
        """A new matcher, which shares its lexer with all others of the same text. Raises GrammarError."""
        return self._prototype(text).deep_copy()

    def compile(self, text: str) -> Any:
        """A newly compiled matcher, checked by making its first mask. Raises GrammarError."""
        llguidance = library()
        vocabulary = self.vocabulary
        try:
            limits = llguidance.LLParserLimits(verbose_errors=False, **_LIMITS)
            matcher = llguidance.LLMatcher(vocabulary, source(llguidance, text), log_level=0, limits=limits)
            begun = self._begin(matcher)
        except BaseException as error:
            raise GrammarError(explained(reason(error))) from error
        if begun.is_error():
            raise GrammarError(explained(begun.get_error()))
        return matcher

    def _begin(self, matcher: Any) -> Any:
        """A copy of a new matcher after the text that is forced at the start. Raises GrammarError if no text fits."""
        begun = matcher.deep_copy()
        text = begun.compute_ff_bytes()
        tokens = np.unpackbits(np.frombuffer(begun.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        if not text and not begun.is_error() and set(tokens) <= set(self.vocabulary.eos_tokens):
            raise GrammarError("no text fits it, or only the empty one")
        plain = text.partition(b"\xff")[0].decode(errors="ignore")  # up to a special token that is asked for
        begun.consume_tokens(self.vocabulary.greedy_tokenize(plain))
        begun.compute_bitmask()
        return begun

    def forget(self, text: str) -> None:
        """Drop a prototype that has reached a limit, so that later copies come from a new one."""
        with self._lock:
            self._compiled.pop(text, None)

    @property
    def vocabulary(self) -> Any:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary

    def _prototype(self, text: str) -> Any:
        with self._lock:
            if (matcher := self._compiled.get(text)) is not None:
                self._compiled.move_to_end(text)
                return matcher
        matcher = self.compile(text)
        with self._lock:
            self._compiled[text] = matcher
            while len(self._compiled) > _MAX_COMPILED or sum(map(len, self._compiled)) > _MAX_CHARS:
                self._compiled.popitem(last=False)
        return matcher

    def _load_vocabulary(self) -> Any:
        try:
            ends = self.eos_token_ids or None
            named = {"n_vocab": self.vocab_size, "eos_token": ends, "slices": _SLICES}
            vocabulary = library().LLTokenizer(self.tokenizer.to_json(), **named)
            self._guessed_ends = () if ends else tuple(vocabulary.eos_tokens)
            return vocabulary
        except BaseException as error:
            raise GrammarError(f"this tokenizer cannot be used with a grammar: {reason(error)}") from error


class Guide:
    """Follows one text token by token, and knows what may come next; it begins after ``marker``, if there is one.

    ``forced`` is the only token that may come next, None if there are several. ``error`` says why the guide has failed,
    after which it cannot be used.
    """

    __slots__ = (
        "_consumed",
        "_forced",
        "_grammars",
        "_is_shared",
        "_marker",
        "_marker_id",
        "_matcher",
        "error",
        "text",
    )

    def __init__(self, grammars: Grammars, text: str, marker: str) -> None:
        self.error = ""
        self._matcher: Any = None
        self._grammars = grammars
        self.text = text
        self._consumed: list[int] = []
        self._forced: deque[int] = deque()
        self._is_shared = True
        self._marker = StopStrings(grammars.tokenizer, (marker,)) if marker else None
        self._marker_id = grammars.tokenizer.token_id(marker) if marker else None
        if not marker:
            self._start()

    @property
    def matcher(self) -> Any:
        """The library's state of this text, made again after a ``release``."""
        if self._matcher is None:
            self._is_shared = True
            self._matcher = self._grammars.copy(self.text)
            self._matcher.consume_tokens(self._consumed)
        return self._matcher

    def release(self) -> None:
        self._matcher = None

    @property
    def is_active(self) -> bool:
        return self._marker is None and not self.error

    @property
    def forced(self) -> int | None:
        return self._forced[0] if self._forced else None

    @property
    def is_complete(self) -> bool:
        """Whether the text so far fits the grammar as it is."""
        return self.is_active and not self._forced and bool(self.matcher.is_accepting())

    @property
    def is_over(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return self.is_complete and bool(self.matcher.is_stopped())

    def push(self, token_id: int) -> None:
        """Take in the next token. May raise TokenizerError while a marker is looked for."""
        if self.error:
            return
        if self._marker is not None:
            marker = self._marker.push(token_id)
            if marker is not None or token_id == self._marker_id:
                remainder = self._marker.remainder.lstrip() if marker else ""
                self._marker = None
                self._start(remainder)
            return
        if self._forced:
            if token_id != self._forced.popleft():
                self.error = f"token {token_id} came where the grammar allows another one only"
        else:
            self._consume([token_id])
        if not self._forced and not self.error:
            self._find_forced()

    def attempt(self, act: Callable[[Any], _Found]) -> _Found | None:
        """Result of ``act`` on the matcher, or on a newly compiled one if that fails; None with an ``error``."""
        result = act(self.matcher)
        if self._is_shared and "lexer" in self.matcher.get_error():
            self._is_shared = False
            self._grammars.forget(self.text)
            self._matcher = self._grammars.compile(self.text)
            if self.matcher.consume_tokens(self._consumed):
                result = act(self.matcher)
        if self.matcher.is_error():
            self.error = explained(self.matcher.get_error())
            return None
        return result

    def _start(self, text: str = "") -> None:
        """Begin with ``text``, the rest of the token that ended the marker."""
        try:
            self._matcher = self._grammars.copy(self.text)
        except GrammarError as error:
            self.error = str(error)
            return
        tokens = self._grammars.tokenizer.encode_batch([text], add_special_tokens=False)[0] if text else []
        if isinstance(tokens, TokenizerError) or self.matcher.validate_tokens(tokens) < len(tokens):
            self.error = f"the token that ends the marker continues with {shown(text)}, which does not fit"
            return
        self._consume(tokens)
        self._find_forced()

    def _find_forced(self) -> None:
        """Find the tokens that must come next. The library leaves out tokens that may change with the following text.

        For a literal text that is written like a special token, the library returns that token, which the grammar does
        not allow. Then only its first byte is forced: the rest is not a special token any more.
        """
        forced = self.attempt(lambda matcher: matcher.compute_ff_tokens())
        if not forced:
            return
        forced = forced[: self.matcher.validate_tokens(forced)]
        if not forced:
            text = self.matcher.compute_ff_bytes()
            forced = self._grammars.vocabulary.tokenize_bytes(text[:1])
        self._consume(forced)
        self._forced.extend(forced)

    def _consume(self, tokens: list[int]) -> None:
        self.attempt(lambda matcher: matcher.consume_tokens(tokens))
        self._consumed += tokens
