"""The samples of a run as a pandas table, one line per sample, and the answer that most samples of a row agree on.

With eval.extract the extracted answers vote, else whole texts do. How many are right is in the report, where
eval.expected is.

python jobs/samples.py runs/samples/outputs.jsonl
"""

import json
import sys
from pathlib import Path

import pandas as pd

if len(sys.argv) != 2:
    sys.exit("usage: python jobs/samples.py runs/samples/outputs.jsonl")
path = Path(sys.argv[1])
with path.open(encoding="utf-8") as file:
    records = [json.loads(line) for line in file]
table = pd.DataFrame(
    {"id": record["id"], **sample} for record in records for sample in record.get("samples") or [record]
)
said = (
    "extracted" if any("extracted" in sample for record in records for sample in record.get("samples", ())) else "text"
)
print(table[[name for name in ("id", "text", "extracted", "finish_reason") if name in table]])

votes = table.dropna(subset=[said]).groupby("id", sort=False)[said].agg(lambda found: found.value_counts().index[0])
print(votes.rename("voted"))

report = json.loads(path.with_name("report.json").read_text(encoding="utf-8"))
if shares := report.get("accuracy", {}).get("samples"):
    print(f"one sample is right: {shares['mean']:.1%}")
    print(f"the vote is right:   {shares['majority']:.1%}")
