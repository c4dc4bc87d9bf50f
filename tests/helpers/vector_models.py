"""Checkpoints that make vectors or labels, and what transformers computes with their weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from families import randomize, raw_config
from torch import Tensor, nn

from batchgen.core.records import Request, SamplingParams
from batchgen.engine import Engine, EngineConfig
from batchgen.engine.pooler import Pooler
from batchgen.model.decoder import Decoder
from batchgen.model.load import load_model
from batchgen.model.vectors import VectorHead, VectorSettings

CLS, LAST, MEAN = "pooling_mode_cls_token", "pooling_mode_lasttoken", "pooling_mode_mean_tokens"


def vector_settings(folder: Path, *modules: dict[str, Any], prompts: dict[str, str] | None = None) -> None:
    """Write ``modules.json`` and what belongs to it; each of ``modules`` has the ``type`` and its own config."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, module in enumerate(modules, 1):
        config = dict(module)
        name = f"{i}_{config['type'].rpartition('.')[2]}"
        listed.append({"idx": i, "name": str(i), "path": name, "type": config.pop("type")})
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    if prompts is not None:
        text = json.dumps({"prompts": prompts, "default_prompt_name": None})
        (folder / "config_sentence_transformers.json").write_text(text, encoding="utf-8")


def pooling_of(mode: str) -> dict[str, Any]:
    return {"type": "sentence_transformers.models.Pooling", mode: True, "word_embedding_dimension": 64}


def saved(folder: Path, model_type: str, architecture: str, **changes: Any) -> Any:
    """A random model of transformers' class for this architecture, saved as that one names it."""
    import transformers

    raw = raw_config(model_type, **changes)
    bare = architecture.replace("Bidirectional", "").replace("ForMaskedLM", "Model")
    config = transformers.AutoConfig.for_model(**raw)
    config.pad_token_id = 0  # of a classifier, which looks for the last token before padding
    model = getattr(transformers, bare)(config).float().eval()
    randomize(model, 0)
    model.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**written, **raw, "architectures": [architecture]}), encoding="utf-8")
    return model


def bidirectional_states(model: Any, token_ids: list[int]) -> Tensor:
    """Hidden states [num_tokens, hidden_size] of transformers' causal LFM2 without mask and with centred taps."""
    from transformers.models.lfm2 import modeling_lfm2

    def centered(layer: Any, hidden_states: Tensor, **_: Any) -> Tensor:
        b, c, x = layer.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
        taps = layer.conv.weight
        mixed = nn.functional.conv1d(b * x, taps, layer.conv.bias, padding=taps.shape[-1] // 2, groups=len(taps))
        return layer.out_proj((c * mixed).transpose(-1, -2))  # type: ignore[no-any-return]

    for layer in model.layers:
        if hasattr(layer, "conv"):
            layer.conv.forward = partial(centered, layer.conv)
    modeling: Any = modeling_lfm2
    before, count = modeling.create_causal_mask, len(token_ids)
    modeling.create_causal_mask = lambda *_, **__: torch.zeros(1, 1, count, count)
    try:
        with torch.no_grad():
            states: Tensor = model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
    finally:
        modeling.create_causal_mask = before
    return states


def loaded(folder: Path, **settings: Any) -> Decoder:
    """The model in ``folder``, without a head."""
    return load_model(str(folder), **{"dtype": "float32", "has_head": False, **settings})


def vectors(
    model: Decoder, texts: dict[int, list[int]], pooling: str, settings: VectorSettings | None = None, **sizes: Any
) -> dict[int, bytes]:
    """The vector of each text, float32."""
    head = VectorHead(settings or VectorSettings(normalize=True), model.kernels, model.config.hidden_size, model.dtype)
    engine = Engine(model, EngineConfig(**{"kv_cache_memory": 1 << 26, **sizes}), sampler=partial(Pooler, head))
    params = SamplingParams(max_tokens=0)
    found = {}
    for result in engine.run([Request(key, tuple(t), params, pooling=pooling) for key, t in texts.items()]):
        assert result.error is None, result.error
        found[result.key] = result.vector
        engine.scheduler.check()
    return found
