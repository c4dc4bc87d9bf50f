"""The model folder's own chat template, rendered as ``transformers`` renders it, in a child process with limits.

A template that exceeds a limit costs only its own chat: that chat gets an error. ``chat_child`` is the program of the
child process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from batchgen.core.limited import LimitedProgram, Program, SetupRefused

MAX_CHARS = 1 << 24  # of one prompt: beyond any context
MAX_CPU_S = 5.0  # processor time per prompt; a published template takes some microseconds
MAX_BYTES = 512 << 20  # memory of the process, which holds a chat and a prompt of the greatest length
_MAX_CHAT_BYTES = 4 * MAX_CHARS

Chat = Sequence[Mapping[str, Any]] | Mapping[str, Any]  # its messages, or all of its variables, ``messages`` among them


class ChatTemplateError(Exception):
    """The template does not compile, or refuses or fails on these messages; ``str()`` is one line."""


class ChatTemplate:
    """A compiled template in a child process, which is started again when a chat has ended it; for one thread.

    ``special_tokens`` are the names that a template expects, such as ``bos_token``. ``now`` is the local time that it
    may print, one for all prompts of a run. ``names`` are the variables that the template takes from outside. Raises
    ChatTemplateError when the source does not compile within the limits of a prompt.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: datetime | None = None) -> None:
        self.source = source
        setup = {
            "source": source,
            "special_tokens": dict(special_tokens),
            "now": (now or datetime.now()).replace(tzinfo=None).isoformat(),
            "max_chars": MAX_CHARS,
        }
        program = Program("batchgen.text.chat_child", "renders chat templates", setup, MAX_CPU_S, MAX_BYTES)
        try:
            self._program = LimitedProgram(program)
        except SetupRefused as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from None
        self.names = frozenset(self._program.greeting.split())

    def render(self, chats: Sequence[Chat]) -> Iterator[str | ChatTemplateError]:
        """Per chat, in order, the prompt up to and with the header of the assistant's turn, or what is wrong.

        Raises BatchgenError when the process cannot be started or kept alive.
        """
        encoded = [_encode(chat) for chat in chats]
        answers = self._program.answers([chat for chat in encoded if isinstance(chat, bytes)])
        for chat in encoded:
            if isinstance(chat, bytes):
                prompt, problem = next(answers)
                yield _failed(problem) if problem else prompt
            else:
                yield chat


def in_one(templates: Mapping[str, str]) -> str:
    """The template that does what those named "default" and "tool_use" do: the second is for chats with tools.

    So choose transformers and vLLM between them. Others are for other calls. Raises KeyError where none is the default.
    """
    default = templates["default"]
    if (for_tools := templates.get("tool_use")) is None:
        return default
    # Each begins a line, as by itself: the newline before it goes with the block. One at its end is no part of it.
    texts = [text.removesuffix("\n") for text in (for_tools, default)]
    return "{%+ if tools %}\n" + "{%+ else %}\n".join(texts) + "{%+ endif +%}"


def _failed(problem: str) -> ChatTemplateError:
    return ChatTemplateError(f"the chat template failed: {problem}")


def _encode(chat: Chat) -> bytes | ChatTemplateError:
    """A chat's variables as one line of JSON; a value without a JSON type, such as a date, becomes its ``str()``."""
    variables = chat if isinstance(chat, Mapping) else {"messages": chat}
    try:
        encoded = json.dumps(variables, ensure_ascii=False, default=str).encode(errors="surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        return _failed(f"the messages cannot be passed to it: {error}")
    if len(encoded) > _MAX_CHAT_BYTES:
        return _failed(f"the messages have {len(encoded):,} bytes; at most {_MAX_CHAT_BYTES:,} are taken")
    return encoded
