"""Rows whose chats are generated again turn by turn (``input.regenerate``): a turn is a request, a row has several.

A ``ChatRow`` holds what its chat has said so far, so that its next request can be made from it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from batchgen.core.errors import RowError
from batchgen.core.records import FinishReason, Result, Row, Sample, Timings

ASSISTANT = "assistant"
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """Generated turn of a chat: its text, the thoughts taken out of it, their number of tokens, and its result."""

    text: str
    reasoning: str | None
    num_thoughts: int
    result: Result

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.result.first.finish_reason

    @property
    def message(self) -> dict[str, Any]:
        """The turn as it goes back into the prompt, without thoughts that were taken out."""
        return {"role": ASSISTANT, "content": self.text}


@dataclass(frozen=True, slots=True)
class ChatRow(Row):
    """A row with the turns of its chat that have been generated so far.

    ``messages`` are those of the row, the last of which is a turn to be generated; a turn of the assistant has no
    content in them. ``digest`` names the chat, and ``num_tokens`` are those of its last prompt if each answer is one
    letter. ``prompt_token_ids`` are those of the next turn, or of the last one, and ``output_token_ids`` the tokens
    that an earlier run generated for this turn and those after it.
    """

    messages: tuple[Message, ...] = ()
    digest: str = ""
    num_tokens: int = 0
    turns: tuple[Turn, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple(getattr(self, item.name) for item in fields(self))

    @property
    def num_turns(self) -> int:
        """Turns that are to be generated, those that are done included."""
        return sum(message["role"] == ASSISTANT for message in self.messages)

    @property
    def is_over(self) -> bool:
        """Whether no turn follows: an answer that was cut off ends the chat."""
        reasons = [turn.finish_reason for turn in self.turns]
        return len(reasons) == self.num_turns or any(reason != FinishReason.STOP for reason in reasons)

    @property
    def generated_token_ids(self) -> tuple[int, ...]:
        """The tokens of all turns that are done, one after the other."""
        return tuple(token_id for turn in self.turns for token_id in turn.result.first.token_ids)

    def token_ids_with(self, current: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """``generated_token_ids`` and those of the current turn, which are those of an earlier run if None."""
        return self.generated_token_ids + (self.output_token_ids if current is None else current)

    def messages_before(self, answers: Iterable[Message]) -> list[Message]:
        """The chat up to the turn that follows ``answers``, which take the place of the first turns."""
        said, answer = list[Message](), iter(answers)
        for message in self.messages:
            if message["role"] == ASSISTANT and (message := next(answer, {})) == {}:
                break
            said.append(message)
        return said

    def in_turn(self, number: int, error: RowError) -> RowError:
        """An error that says in which turn, counted from 0, it came; in the first one it is the row's own."""
        return RowError(error.code, f"turn {number + 1} of {self.num_turns}: {error.message}") if number else error

    def result(self) -> Result:
        """The result of the row: tokens and times of all its turns, and why the last one ended."""
        token_ids, results = self.generated_token_ids, [turn.result for turn in self.turns]
        timings = _in_sequence([result.timings for result in results], len(token_ids))
        num_prompt_tokens = sum(result.num_prompt_tokens for result in results)
        return Result(self.key, num_prompt_tokens, (Sample(token_ids, self.turns[-1].finish_reason),), timings)


def system_before(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The job's system message in a list, which is empty if there is none or the chat has its own."""
    has_system = messages[0]["role"] in ("system", "developer")  # one name for it, or the other
    return [{"role": "system", "content": system}] if system and not has_system else []


def _in_sequence(turns: Sequence[Timings], num_tokens: int) -> Timings:
    """Times of requests that ran one after the other: their sums, and the first token of the first one."""
    totals = {item.name: sum(getattr(timings, item.name) for timings in turns) for item in fields(Timings)}
    totals["ttft_s"] = turns[0].ttft_s
    totals["tpot_s"] = totals["decode_s"] / max(1, num_tokens - len(turns))
    return Timings(**totals)
