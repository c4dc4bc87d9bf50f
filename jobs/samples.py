"""The samples of a run as a pandas table, one line per sample, and the answer that most samples of a row agree on.

python jobs/samples.py runs/samples/outputs.jsonl
"""

import json
import sys
from pathlib import Path

import pandas as pd

if len(sys.argv) != 2:
    sys.exit("usage: python jobs/samples.py runs/samples/outputs.jsonl")
with Path(sys.argv[1]).open(encoding="utf-8") as file:
    rows = pd.DataFrame(map(json.loads, file))
samples = rows[["id", "answer", "samples"]].explode("samples", ignore_index=True)
table = samples[["id", "answer"]].join(pd.json_normalize(samples["samples"].to_list()))
print(table)

votes = table.groupby("id").agg(answer=("answer", "first"), voted=("text", lambda texts: texts.mode()[0]))
print(f"one sample is right: {(table['text'] == table['answer']).mean():.1%}")
print(f"the vote is right:   {(votes['voted'] == votes['answer']).mean():.1%}")
