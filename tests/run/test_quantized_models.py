"""A job on a quantized checkpoint: the command line, from end to end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

from quantized_folders import W8A8, int8, set_quantization, tensor
from run_helpers import ENVIRONMENT, MODEL, JobMaker, rows_of
from safetensors.torch import load_file, save_file


def test_a_job_on_int8_weights_writes_what_their_values_give_and_says_what_it_leaves_out(job: JobMaker) -> None:
    job.write(rows_of(3))
    tensors = load_file(MODEL / "model.safetensors")
    plain, stored = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("w2.weight"):
            parts, wide = int8(weight.double().numpy())
            plain[name] = tensor(wide, weight.dtype)
            del stored[name]
            stored |= {f"{name.removesuffix('.weight')}.{part}": values for part, values in parts.items()}
    said, texts = {}, {}
    for kind, weights in {"plain": plain, "int8": stored}.items():
        folder = job.folder / kind
        shutil.copytree(MODEL, folder)
        save_file(weights, folder / "model.safetensors")
        if kind == "int8":
            set_quantization(folder, W8A8)
        command = ["run", "--input", job.input, "--model", folder, "--output", job.folder / f"{kind}-out"]
        command += ["--prompt", "{question}", "--max-tokens", "8", "--dtype", "bfloat16"]
        done = subprocess.run(
            [sys.executable, "-m", "batchgen", *map(str, command)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said[kind] = done.stderr
        lines = (job.folder / f"{kind}-out" / "outputs.jsonl").read_text().splitlines()
        texts[kind] = [json.loads(line)["text"] for line in lines]
    assert texts["int8"] == texts["plain"]
    note = "the settings for activations in the quantization_config of this checkpoint are not used"
    assert note in said["int8"]
    assert note not in said["plain"]
