"""Records and dead letters as a run writes them, for tests of what reads and writes files of them."""

from __future__ import annotations

from typing import Any

TIMINGS: dict[str, Any] = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "ttft_s", "tpot_s", "total_s"), 0.25)
TIMINGS |= {"cached_tokens": 3, "preemptions": 0, "reused": True}


def record(index: int, **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 5, "completion_tokens": index}
    head = {
        "id": f"q-{index}",
        "index": index,
        "fingerprint": 8 * "5eed",
        "text": f"ответ {index}\n",
        "finish_reason": "stop",
    }
    return {**head, "usage": usage, "timings": TIMINGS, **more}


def dead_letter(index: int, **more: Any) -> dict[str, Any]:
    where = {"id": None, "index": index, "source": "in.jsonl", "line": index + 1}
    return {**where, "code": "bad_json", "message": "no JSON", "row": "{", **more}
