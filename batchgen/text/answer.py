"""Reader of answers: the text of generated tokens, and the thoughts, tool calls and JSON in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from batchgen.core.json_line import json_value
from batchgen.core.records import FinishReason, Sample
from batchgen.text.call_notation import Offered
from batchgen.text.reasoning import Reasoning, text_behind
from batchgen.text.stop_strings import cut_text
from batchgen.text.tokenizer import Tokenizer
from batchgen.text.tool_calls import ToolCalls, tool_format


class AnswerReader:
    """Reads the answers of one model; ``parse`` is the job's ``output.parse``."""

    def __init__(self, tokenizer: Tokenizer, parse: Collection[str]) -> None:
        self._tokenizer = tokenizer
        self._markers = Reasoning(tokenizer)
        self.splits = "reasoning" in parse
        self.finds_json = "json" in parse
        form = tool_format(tokenizer)
        self._tools = ToolCalls(tokenizer, form) if form else None
        self._markers_of_tools = Reasoning(self._tools.tokenizer) if self._tools else None

    @property
    def finds_calls(self) -> bool:
        """Whether the format of the model's tool calls is known."""
        return self._tools is not None

    def fields(
        self, sample: Sample, prompt_token_ids: Sequence[int], *, offered: Offered | None, after: str = ""
    ) -> dict[str, Any]:
        """The fields ``reasoning``, ``tool_calls``, ``text``, ``parsed`` and ``complete`` of a record.

        Fields that were not asked for are left out. ``offered`` are the row's tools, None if calls are not parsed;
        ``after`` is the text after which structured outputs begin.
        """
        tools = None if offered is None else self._tools
        decode = tools.tokenizer.decode if tools else self._tokenizer.decode
        text = decode(sample.token_ids) if sample.stop is None else cut_text(decode, sample.token_ids, sample.stop)
        whole, thoughts, is_complete = text, "", sample.is_complete
        fields: dict[str, Any] = {}
        if splitter := self._markers_of_tools if tools else self._markers if self.splits else None:
            is_open = splitter.is_open(prompt_token_ids)
            reasoning, text = splitter.split(sample.token_ids, text, is_open=is_open)
            if self.splits:
                fields["reasoning"] = reasoning
            else:  # it stays in the text, but its calls do not count
                thoughts = whole.removesuffix(text)
        if tools:
            fields["tool_calls"], text, is_whole = tools.read(text, offered)
            is_complete = is_whole if is_complete is None else is_complete and is_whole is not False
        fields["text"] = thoughts + text
        if self.finds_json:
            if after and not tools:
                text = text_behind(self._tokenizer, after, prompt_token_ids, sample.token_ids, whole)
            fields["parsed"] = None if is_complete is False else _json_or_none(text)
        return fields | ({} if is_complete is None else {"complete": is_complete})

    def num_thoughts(self, sample: Sample, prompt_token_ids: Sequence[int], budget: int) -> int:
        """The tokens of thought in a sample, at most ``budget``."""
        thoughts = self._markers.thoughts(prompt_token_ids, budget)
        ends_by_token = sample.finish_reason is FinishReason.STOP and sample.stop is None
        for token_id in sample.token_ids[: -1 if ends_by_token else None]:
            thoughts.push(token_id)
        return thoughts.num_tokens


def _json_or_none(text: str) -> Any:
    try:
        return json_value(text)
    except ValueError:
        return None
