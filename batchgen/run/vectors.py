"""Vectors of a job: [embed] with its "auto" resolved for a model, and the pooler that makes the vectors.

A checkpoint that was published for vectors makes them without [embed] too, unless the job asks for sampled text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from batchgen.config.job import JobSpec
from batchgen.config.output import EmbedSpec
from batchgen.core.errors import ModelError, UsageError
from batchgen.core.records import SamplingParams
from batchgen.core.units import counted, shown
from batchgen.input.rows import TokenSide
from batchgen.model.config import ModelConfig
from batchgen.model.vector_files import VectorFiles
from batchgen.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from batchgen.engine.pooler import Pooler
    from batchgen.model.decoder import Decoder


def with_embedding(spec: JobSpec, config: ModelConfig, files: VectorFiles) -> JobSpec:
    """The job with [embed] resolved, if it or its model is for vectors. Raises UsageError if that cannot work."""
    is_default, path = spec.sampling == SamplingParams(), spec.model.path
    if not spec.embed.is_on and config.has_head and not (files.is_there and is_default):
        return spec
    if not is_default:
        raise UsageError(f"{path} gives embeddings, not text: write [embed] instead of [sampling]")
    if spec.eval.expected and len(config.labels) < 2:
        raise UsageError("eval.expected compares texts or labels, and this job gives neither: leave it out")
    spec = replace(spec, embed=_resolved(spec.embed, config, files, path))
    if spec.output.format == "openai-batch" and (config.labels or spec.embed.pooling == "tokens"):
        what = "scores of labels" if config.labels else "embeddings of tokens"
        raise UsageError(f'output.format = "openai-batch" has no place for {what}: choose jsonl or parquet')
    spec.check_kind()
    return spec


def cut_note(num_rows: int, cut_at: int | None) -> Iterator[str]:
    """A line about texts that may have been cut at the model's limit, ``cut_at`` tokens, if there are any."""
    if num_rows:
        texts = f"{counted(num_rows, 'text')} may have been cut at {cut_at} tokens, the most that the model takes"
        yield f"{texts}: --no-truncate refuses longer texts"


def _resolved(embed: EmbedSpec, config: ModelConfig, files: VectorFiles, path: str) -> EmbedSpec:
    """[embed] with the checkpoint's settings for those that the job does not set."""
    pooling = embed.pooling or "auto"
    if pooling == "auto":
        pooling = files.pooling or ("last" if config.labels and config.is_causal else "")
    if not pooling:
        raise UsageError(
            f"{path} does not say which tokens make up an embedding: give embed.pooling (--pooling) cls, last or mean, "
            "as the model's card says"
        )
    if config.labels and (embed.dimensions or embed.normalize or pooling == "tokens" or embed.dtype != "float32"):
        raise UsageError(f"{path} gives scores of labels: dimensions, normalize, dtype and tokens are for embeddings")
    prompt = files.default_prompt if embed.prompt is None else embed.prompt
    if files.sides:
        _check_side(replace(embed, pooling=pooling), config, files, path)
    else:
        prompt = files.prompts.get(prompt, prompt)
    normalize = files.normalize if embed.normalize is None else embed.normalize
    return replace(embed, pooling=pooling, prompt=prompt, normalize=normalize)


def _check_side(embed: EmbedSpec, config: ModelConfig, files: VectorFiles, path: str) -> None:
    """Raises UsageError unless the job names a side of late interaction that this model can compute."""
    side = files.sides.get(embed.prompt or "")
    if side is None:
        raise UsageError(
            f"{path} makes different vectors for queries and documents: choose with --embed-prompt query or "
            "--embed-prompt document (embed.prompt)"
        )
    if embed.pooling != "tokens":
        raise UsageError(f'{path} gives a vector for each token: leave embed.pooling = "{embed.pooling}" out')
    if not side.attends and (config.window or (config.biases and config.num_conv_layers)):
        what = "windows" if config.window else "conv_bias"
        raise UsageError(f"{path} lengthens queries by tokens that none attends to: not computed here with {what}")


def side_of(embed: EmbedSpec, files: VectorFiles, tokenizer: Tokenizer | None, longest: int) -> TokenSide | None:
    """The job's side of late interaction with token ids, for texts of up to ``longest`` tokens; None for other models.

    Raises UsageError if one of its tokens is not in the vocabulary.
    """
    side = files.sides.get(embed.prompt or "")
    if side is None or tokenizer is None:
        return None
    ids = []
    for token in (side.marker, side.filler):
        ids.append(tokenizer.token_id(token) if token else None)
        if token and ids[-1] is None:
            raise UsageError(f"the checkpoint marks texts with the token {shown(token)}, which its tokenizer lacks")
    skipped = frozenset(i for word in side.skipped if (i := tokenizer.token_id(word)) is not None)
    return TokenSide(side.strips, ids[0], ids[1] or 0, min(side.filled_to, longest), side.attends, skipped)


def pooler(embed: EmbedSpec, files: VectorFiles, model: Decoder, tokenizer: Tokenizer | None) -> Callable[..., Pooler]:
    """A pooler, which makes vectors of hidden states in place of a sampler; imports torch.

    Raises ModelError, also for late interaction on an unsupported device.
    """
    from batchgen.engine.pooler import Pooler
    from batchgen.model.vectors import VectorHead, VectorSettings

    config = model.config
    side = side_of(embed, files, tokenizer, 0)
    if side and not side.attends and config.is_causal and model.device.type == "cuda":
        raise ModelError("queries of this model are lengthened by tokens that none attends to: use --device cpu")
    settings = VectorSettings(files.dense, bool(embed.normalize), embed.dimensions, config.scores, embed.dtype)
    head = VectorHead(settings, model.kernels, config.hidden_size, model.dtype, model.device)
    return partial(Pooler, head, skipped=side.skipped if side else ())
