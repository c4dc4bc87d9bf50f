"""The model "batchgen" of lm-evaluation-harness, which importing this module registers; ``python -m`` runs ``lm_eval``.

Each kind of request is a run; prompts are cut on the left, get first tokens and are scored as by lm-eval's model "hf".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from batchgen.api import Run, generate
from batchgen.config.job import KEYS
from batchgen.config.load import job_from_values
from batchgen.core.errors import BatchgenError, TokenizerError, UsageError
from batchgen.core.keys import nearest
from batchgen.input.messages import checked_messages
from batchgen.input.rows import RowProblem
from batchgen.run.loader import EngineFactory, read_model
from batchgen.text.chat import CONTINUES, ChatTemplateError
from batchgen.text.tokenizer import special_tokens

_SECTIONS = ("model", "engine")
_NO_EFFECT = ("batch_size", "max_batch_size")  # lm-eval always gives them
_TOKENS = "prompt_token_ids"
_DEFAULT_DEVICE = ("device", "cuda:0")  # lm-eval's command adds it, and its "hf" runs on the CPU without a GPU
Scored = tuple[Any, list[int], list[int]]  # what lm-eval names the request by, its context, and what is scored


@register_model("batchgen")
class BatchgenLM(TemplateLM):
    """A model under evaluation; nothing is loaded before there are requests.

    ``pretrained`` is the ``model.path``. ``keys`` are keys of [model] and [engine], such as ``dtype``, ``tokenizer``,
    ``max_num_seqs`` and ``kv_cache_memory``. ``max_length`` is by default one token less than the model's context.
    lm-eval's ``batch_size`` has no effect: all rows are in one batch, as large as memory allows.

    Raises UsageError for an impossible argument and for a request that cannot run, ModelError for an unusable model.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        output: str = "",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        engine_factory: EngineFactory | None = None,
        **keys: Any,
    ) -> None:
        super().__init__()
        self._tables: dict[str, dict[str, Any]] = {"model": {"path": str(pretrained)}, "engine": {}}
        for name, value in keys.items():
            if name in _NO_EFFECT:
                continue
            section = next((section for section in _SECTIONS if name in KEYS[section]), None)
            if section is None:
                names = [key for section in _SECTIONS for key in KEYS[section]]
                raise UsageError(f"lm-eval: unknown model argument {name!r}{nearest(name, names)}")
            self._tables[section][name] = "auto" if (name, value) == _DEFAULT_DEVICE else value
        if max_length is not None:
            self._tables["engine"]["max_model_len"] = max_length + 1
        info = read_model(job_from_values(self._tables, "lm-eval"), datetime.now())
        if info.tokenizer is None:
            raise UsageError("lm-eval: the model has no tokenizer: name one as tokenizer=")
        self.tokenizer = info.tokenizer
        self.max_length = info.max_model_len - 1
        self.max_gen_toks = max_gen_toks
        self._output, self._engine_factory = output, engine_factory
        special = special_tokens(info.files.tokenizer or info.files.weights or Path())
        ids = {name: info.tokenizer.token_id(text) for name, text in special.items()}
        eos = ids.get("eos_token")
        self._eos = min(info.eos_token_ids, default=0) if eos is None else eos
        self._bos = ids.get("bos_token")

    @property
    def eot_token_id(self) -> int:
        return self._eos

    @property
    def prefix_token_id(self) -> int:
        """Token after which a text without context is scored: the one that begins texts, or else the end token."""
        return self._eos if self._bos is None else self._bos

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval keeps the chat template."""
        model = self._tables["model"]
        return str(model.get("tokenizer") or model["path"]).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, for the log of an evaluation."""
        template = self.tokenizer.chat_template
        return template.source if template and chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a chat; without ``add_generation_prompt`` it ends with the text of the last message."""
        try:
            messages = checked_messages("messages", chat_history)
        except RowProblem as problem:
            raise UsageError(f"lm-eval: {problem}") from None
        text = next(iter(self.tokenizer.render_chats([{"messages": messages, CONTINUES: not add_generation_prompt}])))
        if isinstance(text, ChatTemplateError):
            raise UsageError(f"lm-eval: {text}")
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text, by default with the tokenizer's first tokens, unless the text begins with them."""
        if add_special_tokens is None:
            begin = self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(begin)
        [tokens] = self.tokenizer.encode_batch([string], add_special_tokens)
        if isinstance(tokens, TokenizerError):
            raise UsageError(f"lm-eval: a text cannot be tokenized: {tokens}")
        return tokens

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """A text for each request, cut at the first of its stop strings."""
        rows = []
        for context, kwargs in (request.args for request in requests):
            values = normalize_gen_kwargs(kwargs, self.max_gen_toks)
            until, num_tokens = values.pop("until", None) or [], values.pop("max_gen_toks")
            values.pop("do_sample", None)  # the temperature already says so
            if not 0 < num_tokens < self.max_length:
                raise UsageError(f"lm-eval: max_gen_toks = {num_tokens} must be below max_length = {self.max_length}")
            stop = [text for text in ([until] if isinstance(until, str) else until) if text]
            tokens = self.tok_encode(context)[num_tokens - self.max_length :]
            rows.append({_TOKENS: tokens, "sampling": {"max_tokens": num_tokens, "stop": stop, **values}})
        return self._run("generate_until", rows, lambda run: [record["text"] for record in run])

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, kind: str = "loglikelihood"
    ) -> list[tuple[float, bool]]:
        lengths = [len(scored) for _, _, scored in requests]
        for length in lengths:
            if not 0 < length <= self.max_length:
                raise UsageError(f"lm-eval: a text to score has {length} tokens; 1 to {self.max_length} are possible")
        rows = [{_TOKENS: [*context, *scored][-(self.max_length + 1) :]} for _, context, scored in requests]

        def scores(run: Run) -> list[tuple[float, bool]]:
            return [_score(record["prompt_logprobs"][-n:]) for record, n in zip(run, lengths, strict=True)]

        return self._run(kind, rows, scores, {"max_tokens": 0, "prompt_logprobs": 1})

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each complete text, in windows of ``max_length`` tokens."""
        windows: list[Scored] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            windows += [(None, *make_disjoint_window(window)) for window in rolling]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, kind="loglikelihood_rolling")
        for owner, (total, _) in zip(owners, scores, strict=True):
            totals[owner] += total
        return totals

    def _run(
        self,
        kind: str,
        rows: list[dict[str, Any]],
        read: Callable[[Run], list[Any]],
        sampling: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """The result of ``read`` on a run over ``rows``, in a separate folder of ``output`` if that is given."""
        if not rows:
            return []
        with ExitStack() as stack:
            if self._output:
                digest = sha256(json.dumps([rows, sampling]).encode()).hexdigest()
                folder = str(Path(self._output) / f"{kind}-{digest[:16]}")
            else:
                folder = stack.enter_context(TemporaryDirectory(prefix="batchgen-"))
            run = generate(
                rows,
                model=self._tables["model"],
                engine=self._tables["engine"],
                input={_TOKENS: _TOKENS, "columns": []},
                sampling=sampling,
                output=folder,
                engine_factory=self._engine_factory,
            )
            for error in run.errors:
                raise UsageError(f"lm-eval: {kind}, request {error['index']}: {error['message']} ({error['code']})")
            return read(run)


def _score(tokens: Sequence[dict[str, Any]]) -> tuple[float, bool]:
    """The sum of log-probabilities, and whether each token was the likeliest."""
    likeliest = all(token["top_logprobs"][0]["token_id"] == token["token_id"] for token in tokens)
    return sum(token["logprob"] for token in tokens), likeliest


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except BatchgenError as error:
        print(f"batchgen: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
