"""Requests of chats that are generated again: one per turn, with the chat up to the header of the turn's answer.

``TurnBuilder.after`` adds a turn to its row, and ``build`` makes the next request; ``run`` decides when it is sent.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from batchgen.config.identity import rng_key_of_turn
from batchgen.config.sampling import keys_beyond_turns
from batchgen.core.chat_rows import ASSISTANT, ChatRow, Message, Turn
from batchgen.core.errors import RowError, RowErrorCode, TokenizerError
from batchgen.core.records import Request, Result, Row, SamplingParams
from batchgen.core.units import shown
from batchgen.input.messages import checked_messages, checked_tools, has_text
from batchgen.input.requests import RequestBuilder
from batchgen.input.rows import RowProblem
from batchgen.text.answer import AnswerReader

_ROLES = ("system", "developer", "user", ASSISTANT)
_LETTER = {"role": ASSISTANT, "content": "a"}  # in place of answers that are not known yet


class TurnBuilder(RequestBuilder):
    """Builds the requests of a job that generates its chats again; its rows become ``ChatRow``.

    A row fails before its first turn if its chat, with one-letter answers, does not fit into the context or the
    template refuses it.
    """

    def __init__(self, *args: Any, parse: Collection[str], **settings: Any) -> None:
        """As ``RequestBuilder``; ``parse`` is the job's ``output.parse``."""
        super().__init__(*args, **settings)
        assert self._tokenizer is not None, "ContentFinder has refused chats without one"
        self._answers = AnswerReader(self._tokenizer, parse)

    def build(self, rows: Sequence[Row]) -> Iterator[tuple[ChatRow, Request | None]]:
        """Each row with the request of its next turn, or with an error and None if it cannot run."""
        begun = self._begun(rows)
        made = super().build([self._asking(row, [turn.message for turn in row.turns]) for row in begun])
        for row, (current, request) in zip(begun, made, strict=True):
            number = len(row.turns)
            if request is None:
                error = current.error and row.in_turn(number, current.error)
                yield replace(row, error=error), None
                continue
            rng_key = rng_key_of_turn(request.rng_key or 0, number)
            asking = replace(request, rng_key=rng_key, turn=number, num_turns=row.num_turns)
            yield replace(row, params=current.params, prompt_token_ids=current.prompt_token_ids), asking

    def after(self, row: Row, result: Result) -> tuple[ChatRow, Result | None]:
        """The row with the turn that ``result`` finishes, and the row's result, or None if another turn follows."""
        assert isinstance(row, ChatRow), "it was built here"
        row = self._answered(row, result)
        if row.error is not None:
            return row, replace(result, error=row.error)
        return row, row.result() if row.is_over else None

    def _answered(self, row: ChatRow, result: Result) -> ChatRow:
        number = len(row.turns)
        if result.error is not None:
            return replace(row, error=row.in_turn(number, result.error))
        try:
            turn = self._turn(row, result)
        except TokenizerError as problem:
            return replace(row, error=row.in_turn(number, RowError(RowErrorCode.INTERNAL, str(problem))))
        before, token_ids = row.output_token_ids, result.first.token_ids
        left = before[len(token_ids) :] if before[: len(token_ids)] == token_ids else ()
        return replace(row, turns=(*row.turns, turn), output_token_ids=left)

    def _turn(self, row: ChatRow, result: Result) -> Turn:
        sample, prompt, budget = result.first, row.prompt_token_ids, row.params.thinking_token_budget
        said = self._answers.fields(sample, prompt, offered=None)
        num_thoughts = 0 if budget is None else self._answers.num_thoughts(sample, prompt, budget)
        return Turn(said["text"], said.get("reasoning"), num_thoughts, result)

    def _refusal(self, params: SamplingParams) -> str:
        beyond = keys_beyond_turns(params)
        return f"{beyond[0]} does not fit input.regenerate: leave it out" if beyond else super()._refusal(params)

    def _begun(self, rows: Sequence[Row]) -> list[ChatRow]:
        """The rows as ``ChatRow``, each with its digest, or with an error if one of its turns cannot run."""
        opened = [row if isinstance(row, ChatRow) else self._opened(row) for row in rows]
        fresh = [row for row in opened if row.error is None and not row.digest]
        made = super().build([self._asking(row, [_LETTER] * (row.num_turns - 1)) for row in fresh])
        named = {row.index: self._named(row, request) for row, (_, request) in zip(fresh, made, strict=True)}
        return [named.get(row.index, row) for row in opened]

    def _opened(self, row: Row) -> ChatRow:
        """The row as a ``ChatRow``, with the messages of its chat if they are valid, otherwise with an error."""
        chat, name = ChatRow(*(getattr(row, item.name) for item in fields(row))), self._spec.messages or ""
        if row.error is not None or name not in row.columns:
            return chat
        try:
            return replace(chat, messages=_messages(name, row.columns))
        except RowProblem as problem:
            return replace(chat, error=problem.error)

    def _named(self, row: ChatRow, request: Request | None) -> ChatRow:
        """The row with a digest of ``request``, its last turn; without one, with the error of its first bad turn."""
        if request is not None:
            template, spec = self._tokenizer and self._tokenizer.chat_template, self._spec
            variables = spec.system, spec.chat_template_kwargs, row.columns.get("chat_template_kwargs")
            text = json.dumps([template and template.source, *variables, row.messages], default=str).encode()
            tokens = request.prompt_token_ids
            digest = blake2b(text + array("i", tokens).tobytes(), digest_size=16).hexdigest()
            return replace(row, digest=digest, num_tokens=len(tokens))
        for number in range(row.num_turns):
            [(current, request)] = super().build([self._asking(row, [_LETTER] * number)])
            if current.error is not None:
                return replace(row, error=row.in_turn(number, current.error))
        return row

    def _asking(self, row: ChatRow, answers: Sequence[Message]) -> ChatRow:
        """The row with its chat cut after ``answers``, before the turn to be generated."""
        name = self._spec.messages
        if not row.messages or name is None:
            return row
        return replace(row, columns={**row.columns, name: row.messages_before(answers)})


def _messages(name: str, columns: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of a chat, ending with the assistant's turn (added if missing); these turns lose their content.

    Raises RowProblem as ``checked_messages``, for other roles, for tools, and if no text comes before the first answer.
    """
    messages: list[Message] = []
    for number, message in enumerate(checked_messages(name, columns[name])):
        if message.get("tool_calls") or message["role"] in ("tool", "function"):
            what = f"{name}[{number}] calls a tool or has the result of a call"
            raise RowProblem(RowErrorCode.BAD_PARAM, f"{what}: input.regenerate takes chats without calls")
        if message["role"] not in _ROLES:
            why = f"is {shown(message['role'], 60)}: input.regenerate takes the roles {', '.join(_ROLES)}"
            raise RowProblem(RowErrorCode.BAD_PARAM, f"{name}[{number}].role {why}")
        messages.append({"role": ASSISTANT} if message["role"] == ASSISTANT else message)
    prompt = list(takewhile(lambda message: message["role"] != ASSISTANT, messages))
    if not any(has_text(message["content"]) for message in prompt):
        why = "is the assistant's, and no text comes before it: remove it, or put a message before it"
        raise RowProblem(RowErrorCode.EMPTY_PROMPT, f"{name}[{len(prompt)}] {why}")
    if checked_tools(columns.get("tools")) and columns.get("tool_choice") != "none":
        why = 'input.regenerate takes chats without tools: leave them out, or give tool_choice = "none"'
        raise RowProblem(RowErrorCode.BAD_PARAM, f"tools: {why}")
    ends = messages[-1]["role"] == ASSISTANT
    return (*messages, *([] if ends else [{"role": ASSISTANT}]))
