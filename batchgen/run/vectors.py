"""[embed] of a job with a model: its "auto" resolved, and the pooler that makes the vectors.

A checkpoint that was published to make vectors gives them without [embed] too, unless the job asks for sampled text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from batchgen.config.embed import EmbedSpec
from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.core.records import SamplingParams
from batchgen.model.config import ModelConfig
from batchgen.model.vector_files import VectorFiles

if TYPE_CHECKING:
    from batchgen.engine.pooler import Pooler
    from batchgen.model.decoder import Decoder


def with_embedding(spec: JobSpec, config: ModelConfig, files: VectorFiles) -> JobSpec:
    """The job with [embed] resolved, if it or its model is for vectors. Raises UsageError where that cannot work."""
    is_default, path = spec.sampling == SamplingParams(), spec.model.path
    if not spec.embed.is_on and config.has_head and not (files.is_there and is_default):
        return spec
    if not is_default:
        raise UsageError(f"{path} gives embeddings, no text: write [embed] instead of [sampling]")
    if spec.eval.expected and len(config.labels) < 2:
        raise UsageError("eval.expected compares texts or labels, and this job gives neither: leave it out")
    spec = replace(spec, embed=_resolved(spec.embed, config, files, path))
    if spec.output.format == "openai-batch" and (config.labels or spec.embed.pooling == "tokens"):
        what = "scores of labels" if config.labels else "embeddings of tokens"
        raise UsageError(f'output.format = "openai-batch" has no place for {what}: choose jsonl or parquet')
    spec.check_kind()
    return spec


def _resolved(embed: EmbedSpec, config: ModelConfig, files: VectorFiles, path: str) -> EmbedSpec:
    """[embed] with the checkpoint's settings where the job has none."""
    pooling = embed.pooling or "auto"
    if pooling == "auto":
        pooling = files.pooling or ("last" if config.labels and config.is_causal else "")
    if not pooling:
        raise UsageError(
            f"{path} does not say which tokens make up an embedding: give embed.pooling (--pooling) cls, last or mean, "
            "as the model's card says"
        )
    if config.labels and (embed.dimensions or embed.normalize or pooling == "tokens"):
        raise UsageError(f"{path} gives scores of labels: dimensions, normalize and tokens are for embeddings")
    prompt = files.default_prompt if embed.prompt is None else embed.prompt
    normalize = files.normalize if embed.normalize is None else embed.normalize
    return replace(embed, pooling=pooling, prompt=files.prompts.get(prompt, prompt), normalize=normalize)


def pooler(embed: EmbedSpec, files: VectorFiles, model: Decoder) -> Callable[..., Pooler]:
    """Pooler that makes vectors of hidden states in the place of a sampler; imports torch. Raises ModelError."""
    from batchgen.engine.pooler import Pooler
    from batchgen.model.vectors import VectorHead, VectorSettings

    config = model.config
    settings = VectorSettings(files.dense, bool(embed.normalize), embed.dimensions, config.scores)
    return partial(Pooler, VectorHead(settings, model.kernels, config.hidden_size, model.dtype, model.device))
