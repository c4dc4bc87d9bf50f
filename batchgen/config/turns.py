"""Limits of jobs that generate chats again turn by turn (``input.regenerate``): a turn is one plain text."""

from __future__ import annotations

from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.core.records import SamplingParams


def keys_beyond_turns(params: SamplingParams) -> list[str]:
    """The keys of [sampling] and [classify] whose values no turn of a chat can have."""
    is_beyond = {
        "n": params.n > 1,
        "max_tokens": not params.max_tokens,
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "structured_outputs": bool(params.structured_outputs),
        "labels": bool(params.labels),
    }
    return [key for key, is_given in is_beyond.items() if is_given]


def check_turns(spec: JobSpec) -> None:
    """Refuse what does not fit chats that are generated turn by turn. Raises UsageError."""
    source, output = spec.input, spec.output
    if source.regenerate is None:
        return
    if source.messages is None:
        raise UsageError("input.regenerate takes chats: name their column in input.messages")
    is_beyond = {
        "[embed]": spec.embed.is_on,
        **{f"sampling.{key}": True for key in keys_beyond_turns(spec.sampling)},
        "input.continue_final_message": source.continue_final_message,
        'input.chat_template = "none"': not source.is_templated,
        "output.token_ids": output.token_ids,
        "output.parse = tool_calls": "tool_calls" in output.parse,
        "output.parse = json": "json" in output.parse,
        'output.format = "openai-batch"': output.format == "openai-batch",
    }
    for name in [name for name, is_given in is_beyond.items() if is_given]:
        raise UsageError(f"{name} does not fit input.regenerate, whose turns are plain texts: leave one of them out")
