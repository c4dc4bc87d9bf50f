"""Drivers of engines that make vectors: as ``drivers.py``, for rows with a text in ``prompt`` and one vector a row.

Each tokenizes by itself and sorts as it likes. Only batchgen's generation holds its loading too, which is a whole job.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator

from drivers import Generate, model_settings, run_one


def batchgen(given: argparse.Namespace, texts: list[str]) -> tuple[str, Generate]:
    """A whole job in memory: model loaded, rows read, vectors kept."""
    from batchgen import generate
    from batchgen.core.version import __version__

    settings = model_settings(given.dtype)

    def vectors() -> Iterator[int]:
        run = generate(texts, model={"path": given.model, **settings}, embed={"pooling": "auto"})
        return (len(row["embedding"]) for row in run.rows)

    return __version__, vectors


def sentence_transformers(given: argparse.Namespace, texts: list[str]) -> tuple[str, Generate]:
    """``encode``, which sorts texts by length and pads each batch."""
    torch, module = map(importlib.import_module, ("torch", "sentence_transformers"))
    settings = {"dtype": getattr(torch, given.dtype)}
    model = module.SentenceTransformer(given.model, device="cpu", model_kwargs=settings)
    return str(module.__version__), lambda: map(len, model.encode(texts, batch_size=given.batch))


def vllm(given: argparse.Namespace, texts: list[str]) -> tuple[str, Generate]:
    """``LLM.embed``."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")  # else it leaves one idle
    module = importlib.import_module("vllm")
    settings = {"enforce_eager": True, "disable_log_stats": True, "max_num_seqs": given.max_num_seqs}
    engine = module.LLM(
        model=given.model, dtype=given.dtype, runner="pooling", convert="embed", max_model_len=1024, **settings
    )

    def vectors() -> Iterator[int]:
        return (len(answer.outputs.embedding) for answer in engine.embed(texts, use_tqdm=False))

    return str(module.__version__), vectors


def openvino(given: argparse.Namespace, texts: list[str]) -> tuple[str, Generate]:
    """``TextEmbeddingPipeline`` over batches sorted by length; ``--model`` is what optimum-cli has exported."""
    genai = importlib.import_module("openvino_genai")
    config = genai.TextEmbeddingPipeline.Config()
    config.pooling_type, config.normalize = genai.TextEmbeddingPipeline.PoolingType.LAST_TOKEN, True
    engine = genai.TextEmbeddingPipeline(given.model, "CPU", config)
    by_length = sorted(texts, key=len)

    def vectors() -> Iterator[int]:
        for first in range(0, len(texts), given.batch):
            yield from map(len, engine.embed_documents(by_length[first : first + given.batch]))

    return str(genai.__version__), vectors


if __name__ == "__main__":
    run_one({each.__name__: each for each in (batchgen, sentence_transformers, vllm, openvino)}, "prompt")
