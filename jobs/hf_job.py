# /// script
# requires-python = ">=3.11"
# dependencies = ["batchgen @ git+https://git.example.com/batchgen@COMMIT"]  # your copy: PyPI's is another package
# ///
"""A job on rented hardware of the Hub: it reads a dataset from the Hub and publishes the outputs into another one.

    hf jobs uv run --flavor cpu-upgrade --timeout 4h --secrets HF_TOKEN jobs/hf_job.py \\
        "hf:openai/gsm8k?config=main&split=test" hf://datasets/USER/answers

The disk of such a job is gone when it ends, so a job that is cut off starts over: choose --timeout long enough.
"""

import sys

from batchgen import run_job

source, target = sys.argv[1:3]
run = run_job(
    source,
    model=sys.argv[3] if len(sys.argv) > 3 else "LiquidAI/LFM2-350M",
    prompt="{question}",
    max_tokens=512,
    output={"path": "run", "publish": target},
)
print(run)
sys.exit(3 if run.errors else 0)
