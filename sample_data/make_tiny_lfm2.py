"""Make the sample model and the sample rows: a small LFM2 that really does a few tasks, trained from nothing.

Why: every example, test and demonstration of batchgen should run offline, in seconds, on answers that can be
checked exactly. This script is the whole provenance of `tiny-lfm2/`, `questions.jsonl` and `bad_rows.jsonl`: it
makes up the questions, trains a byte-level BPE on them, trains `transformers.Lfm2ForCausalLM` with a fixed seed, and
writes a checkpoint in the layout of the Hub. No data or weights come from elsewhere.

    pip install -e '.[test]'
    python sample_data/make_tiny_lfm2.py               # train and write everything: about 20 minutes on 2 cores
    python sample_data/make_tiny_lfm2.py --evaluate    # only score the folder on the held-out questions: seconds

What is held out: no question of `questions.jsonl` is trained on, nor the same operands in another wording or order;
the words asked about there never occur in training, which sees made-up words only. Rerunning gives the same rows and
tokenizer; the weights agree in quality, not in bits, because float sums depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, Lfm2Config, Lfm2ForCausalLM

FOLDER = Path(__file__).parent
MODEL = FOLDER / "tiny-lfm2"
SEED = 20

# ---------------------------------------------------------------- the tasks


def listed(words: str) -> list[str]:
    """Split a text at white space."""
    return words.split()


WORDS = listed("""
anchor apple autumn basket beacon bottle branch bridge button candle carpet castle cherry circle clover coffee copper
corner cotton cradle desert dinner dragon engine falcon feather fiddle finger flower forest garden ginger glacier
guitar hammer harbor harvest helmet honey island jacket jungle kettle kitten ladder lantern lemon library magnet
marble meadow mirror monkey mountain needle ocean orange orchard oyster paddle panther pencil pepper pillow planet
pocket potato puzzle rabbit railway ribbon river rocket saddle sailor shadow silver spider spring stable statue
summer sunset table teapot temple thunder tiger timber tunnel turtle umbrella valley velvet village violin wagon
walnut water willow window winter wizard yellow zebra
""")
PHRASE_WORDS = listed("""
the a old small green quiet seven boats cats birds sail sleep sing under near over bridge river moon house road with
and their big red wooden slow train stops here today every night
""")
NAMES = listed("Ada Bruno Chloé Dmitri Elena Farid Grace Hana Ivan Jorge Kenji Lena Mårten Nora Omar Priya Renée Sofia")
CITIES = listed("Paris Oslo Lima Cairo Zürich Kraków Lagos Quito Boston Delhi Málaga Tokyo 東京 Nairobi Perth Seoul")
COLORS = listed("red green blue white black amber violet")
ANIMALS = listed("cat dog horse owl goat otter crow")
JOBS = listed("baker nurse pilot clerk farmer welder tailor")
SYSTEM_PROMPTS = (
    "You are terse.",
    "Answer with the result only.",
    "You are a careful assistant. Read the question, do exactly what it asks, and write the answer without any other "
    "words. Do not explain, do not repeat the question, and do not add a full stop at the end.",
)


@dataclass(frozen=True)
class Row:
    """One question with its only right answer; `key` is the same for every wording of the same exercise."""

    task: str
    question: str
    answer: str
    key: Hashable


Words = Callable[[random.Random, int, int], str]  # a word of at least and at most so many letters


def made_up_word(rng: random.Random, min_letters: int, max_letters: int) -> str:
    """Half of them syllables, half any letters at all; never a word of WORDS."""
    length = rng.randint(min_letters, max_letters)
    if rng.random() < 0.5:
        word = "".join(rng.choice("aeiou" if i % 2 else "bcdfghjklmnprstvwxyz") for i in range(length))
    else:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))
    return word if word not in WORDS else made_up_word(rng, min_letters, max_letters)


def real_word(rng: random.Random, min_letters: int, max_letters: int) -> str:
    """A word of WORDS where one of that length exists (there is none of 13 letters or more)."""
    fitting = [word for word in WORDS if min_letters <= len(word) <= max_letters]
    return rng.choice(fitting) if fitting else made_up_word(rng, min_letters, max_letters)


def add(rng: random.Random, words: Words) -> Row:
    """Two numbers of one or two digits."""
    a, b = (rng.randint(0, rng.choice((9, 99, 99, 99))) for _ in range(2))
    wording = rng.choice(("Add {} and {}.", "What is {} plus {}?"))
    return Row("add", wording.format(a, b), str(a + b), (min(a, b), max(a, b)))


def larger(rng: random.Random, words: Words) -> Row:
    """The larger of two different numbers below 100."""
    a, b = rng.sample(range(100), 2)
    return Row("larger", f"Which is larger, {a} or {b}?", str(max(a, b)), (min(a, b), max(a, b)))


def reverse(rng: random.Random, words: Words) -> Row:
    """Mostly a word, now and then a string of up to 24 letters."""
    word = words(rng, 13, 24) if rng.random() < 0.2 else words(rng, 3, 12)
    return Row("reverse", f'Reverse the letters of "{word}".', word[::-1], word)


def sort(rng: random.Random, words: Words) -> Row:
    """Letters in alphabetical order."""
    word = words(rng, 3, 9)
    return Row("sort", f'Sort the letters of "{word}".', "".join(sorted(word)), word)


def upper(rng: random.Random, words: Words) -> Row:
    """Letters into capitals."""
    word = words(rng, 3, 12)
    return Row("upper", f'Write "{word}" in capital letters.', word.upper(), word)


def spell(rng: random.Random, words: Words) -> Row:
    """Letters with a dash between."""
    word = words(rng, 3, 12)
    return Row("spell", f'Spell "{word}" with dashes.', "-".join(word), word)


def length(rng: random.Random, words: Words) -> Row:
    """The number of letters."""
    word = words(rng, 3, 9)
    return Row("length", f'How many letters are in "{word}"?', str(len(word)), word)


def times(rng: random.Random, words: Words) -> Row:
    """A word again and again: a short question with a long answer."""
    word = words(rng, 3, 7)
    count = rng.randint(2, 7)
    return Row("times", f'Write "{word}" {count} times, joined by dashes.', "-".join([word] * count), (word, count))


def count(rng: random.Random, words: Words) -> Row:
    """Up to 20 numbers in a row, upwards or downwards: a short question with a long answer."""
    first = rng.randint(0, 80)
    last = first + rng.randint(1, 19)
    if rng.random() < 0.5:
        numbers, question = range(first, last + 1), f"Count from {first} to {last}."
    else:
        numbers, question = range(last, first - 1, -1), f"Count down from {last} to {first}."
    return Row("count", question, " ".join(map(str, numbers)), (first, last))


def repeat(rng: random.Random, words: Words) -> Row:
    """A phrase, or a code of letters, digits and dashes: up to 60 tokens to copy."""
    if rng.random() < 0.5:
        text = " ".join(rng.choices(PHRASE_WORDS, k=rng.randint(1, rng.choice((4, 8, 14)))))
    else:
        num_groups = rng.randint(1, rng.choice((3, 6, 11)))
        groups = ["".join(rng.choices("abcdefghijkmnpqrstuvwxyz23456789", k=4)) for _ in range(num_groups)]
        text = "-".join(groups)
    return Row("repeat", f'Repeat this: "{text}"', text, text)


def field(rng: random.Random, words: Words) -> Row:
    """A record of 2 to 12 fields in any order, and the name of one of them."""
    record = {
        "name": rng.choice(NAMES),
        "city": rng.choice(CITIES),
        "age": str(rng.randint(1, 99)),
        "color": rng.choice(COLORS),
        "animal": rng.choice(ANIMALS),
        "job": rng.choice(JOBS),
        "year": str(rng.randint(1900, 2099)),
        "code": "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ23456789", k=rng.randint(3, 6))),
        "friend": rng.choice(NAMES),
        "pet": rng.choice(NAMES),
        "phone": "-".join(f"{rng.randint(0, 9999):04d}" for _ in range(3)),
        "key": "".join(rng.choices("abcdef0123456789", k=rng.randint(6, 16))),
    }
    names = rng.sample(list(record), rng.randint(2, rng.choice((4, 8, len(record)))))
    text = "; ".join(f"{name}={record[name]}" for name in names)
    asked = rng.choice(names)
    return Row("field", f"In the record {text}, what is the {asked}?", record[asked], (text, asked))


# Share of the training rows: adding and copying need the most practice.
TASKS: dict[Callable[[random.Random, Words], Row], float] = {
    add: 2.5,
    field: 3.0,
    repeat: 2.0,
    sort: 2.0,
    reverse: 1.5,
    count: 1.2,
    times: 0.7,
    larger: 0.6,
    spell: 0.6,
    upper: 0.6,
    length: 0.3,
}


def held_out_rows(num_rows: int) -> list[Row]:
    """As many of each task, no exercise twice, in mixed order."""
    rng = random.Random(SEED)
    tasks = list(TASKS)
    rows: dict[Hashable, Row] = {}
    while len(rows) < num_rows:
        row = tasks[len(rows) % len(tasks)](rng, real_word)
        rows.setdefault((row.task, row.key), row)
    mixed = list(rows.values())
    rng.shuffle(mixed)
    return mixed


def training_rows(held_out: list[Row]) -> Iterator[Row]:
    """An endless stream of exercises, none of them held out."""
    rng = random.Random(SEED + 1)
    refused = {(row.task, row.key) for row in held_out}
    tasks, shares = list(TASKS), list(TASKS.values())
    while True:
        row = rng.choices(tasks, shares)[0](rng, made_up_word)
        if (row.task, row.key) not in refused:
            yield row


# ---------------------------------------------------------------- the tokenizer

SPECIAL_TOKENS = (  # LFM2's first eight ids, in order
    "<|pad|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|fim_pre|>",
    "<|fim_mid|>",
    "<|fim_suf|>",
    "<|im_start|>",
    "<|im_end|>",
)
PAD_ID, BOS_ID, EOS_ID = 0, 1, 7
VOCAB_SIZE = 640
# Only a role, a word after a space, or a capitalized one may become one token. Quoted words fall to single letters,
# numbers to single digits: that is what makes the letter and number tasks learnable by so small a model.
PIECES = r"(?:system|user|assistant)(?=\n)| \p{L}+|\p{Lu}\p{Ll}+|\p{L}|\p{N}| ?[^\s\p{L}\p{N}]|\s"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE over the questions, with LFM2's special tokens at LFM2's ids and its bos in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL_TOKENS[BOS_ID]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, BOS_ID)]
    )
    return tokenizer


def render(row: Row, system: str = "") -> str:
    """The prompt of a row, as CHAT_TEMPLATE would write it (evaluation checks that the two agree)."""
    turns = [("system", system)] if system else []
    turns.append(("user", row.question))
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"<|startoftext|>{text}<|im_start|>assistant\n"


# ---------------------------------------------------------------- the model

CONFIG: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 192,
    "block_ff_dim": 576,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 64,
    "block_norm_eps": 1e-05,
    "block_use_swiglu": True,
    "bos_token_id": BOS_ID,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 192,
    "conv_dim_out": 192,
    "eos_token_id": EOS_ID,
    "full_attn_idxs": [1, 3, 5],
    "hidden_size": 192,
    "initializer_range": 0.02,
    "max_position_embeddings": 1024,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 6,
    "num_heads": 6,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "pad_token_id": PAD_ID,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": VOCAB_SIZE,
}

NUM_STEPS = 2400
ROWS_PER_STEP = 64
BATCH_TOKENS = 900  # most positions of one forward, padding included
MUON_LEARNING_RATE = 4e-3
ADAMW_LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
SYSTEM_SHARE = 0.15
NO_TARGET = -100


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right, which no position before the padding can see.

    token_ids [num_rows, num_positions]; targets of the same shape: the next token where it belongs to the answer or
    ends it, else NO_TARGET.
    """

    token_ids: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True)
class Example:
    """A rendered prompt and its answer, the end token included, as token ids."""

    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def num_positions(self) -> int:
        """How many tokens the model reads: all but the last."""
        return len(self.prompt_ids) + len(self.answer_ids) - 1


def encode(tokenizer: Tokenizer, row: Row, system: str = "") -> Example:
    """Tokenize a row: the prompt as rendered, the answer followed by the end token."""
    prompt = tokenizer.encode(render(row, system), add_special_tokens=False).ids
    answer = tokenizer.encode(row.answer, add_special_tokens=False).ids
    return Example(prompt, [*answer, EOS_ID])


def make_batch(examples: list[Example]) -> Batch:
    """Stack examples, padded to the longest."""
    shape = len(examples), max(example.num_positions for example in examples)
    token_ids = torch.full(shape, PAD_ID)
    targets = torch.full(shape, NO_TARGET)
    for i, example in enumerate(examples):
        token_ids[i, : example.num_positions] = torch.tensor((example.prompt_ids + example.answer_ids)[:-1])
        targets[i, len(example.prompt_ids) - 1 : example.num_positions] = torch.tensor(example.answer_ids)
    return Batch(token_ids, targets)


def forward(model: Lfm2ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [num_answer_tokens, vocab_size] at the positions that have a target, and those targets."""
    hidden = model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    wanted = batch.targets != NO_TARGET
    return model.lm_head(hidden[wanted]), batch.targets[wanted]


def step_batches(tokenizer: Tokenizer, rows: Iterator[Row], rng: random.Random) -> list[Batch]:
    """One step's rows, those of similar length together, so that little of the work is padding."""
    examples = []
    for _ in range(ROWS_PER_STEP):
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < SYSTEM_SHARE else ""
        examples.append(encode(tokenizer, next(rows), system))
    examples.sort(key=lambda example: example.num_positions)
    groups: list[list[Example]] = [[]]
    for example in examples:
        if (len(groups[-1]) + 1) * example.num_positions > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(example)
    return [make_batch(group) for group in groups]


def learning_rate_factor(step: int) -> float:
    """Linear warm-up, then linearly down to zero."""
    return min((step + 1) / WARMUP_STEPS, 1 - step / NUM_STEPS)


def make_optimizers(model: Lfm2ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, which learns these tasks in far fewer steps; AdamW for the rest."""
    parameters = dict(model.named_parameters())
    matrices = [p for name, p in parameters.items() if p.ndim == 2 and "embed_tokens" not in name]
    rest = [p for name, p in parameters.items() if p.ndim != 2 or "embed_tokens" in name]
    return [
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def backward(model: Lfm2ForCausalLM, batches: list[Batch]) -> float:
    """Add the gradients of the mean loss over a step's answer tokens; returns that loss."""
    num_targets = sum(int((batch.targets != NO_TARGET).sum()) for batch in batches)
    loss = 0.0
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            logits, targets = forward(model, batch)
        part = cross_entropy(logits.float(), targets, reduction="sum") / num_targets
        torch.autograd.backward(part)
        loss += part.item()
    return loss


def train_model(tokenizer: Tokenizer, rows: Iterator[Row]) -> Lfm2ForCausalLM:
    """Train from random weights on rows from the stream; bfloat16 products, float32 weights."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED + 2)
    # For rows this short, plain attention is faster than the fused kernel on a CPU.
    model = Lfm2ForCausalLM(Lfm2Config(**CONFIG | {"attn_implementation": "eager"}))
    optimizers = make_optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor) for optimizer in optimizers]
    started_at = time.monotonic()
    losses = []
    for step in range(1, NUM_STEPS + 1):
        losses.append(backward(model, step_batches(tokenizer, rows, rng)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 100 == 0:
            print(
                f"step {step:5d}  loss {sum(losses[-100:]) / 100:.4f}  {time.monotonic() - started_at:5.0f} s",
                flush=True,
            )
    return model


# ---------------------------------------------------------------- writing


def write_json(path: Path, value: object) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer) -> None:
    """Write `tokenizer.json` and the settings that go with it."""
    MODEL.mkdir(exist_ok=True)
    tokenizer.save(str(MODEL / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(MODEL / "tokenizer_config.json", settings)


def write_model(model: Lfm2ForCausalLM) -> None:
    """Weights in bfloat16 under the Hub's names; the tied output projection is not stored."""
    MODEL.mkdir(exist_ok=True)
    tensors = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items() if name != "lm_head.weight"}
    (MODEL / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    write_json(MODEL / "config.json", CONFIG)
    write_json(
        MODEL / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
    )


def write_questions(rows: list[Row]) -> None:
    """Write `questions.jsonl`."""
    lines = [
        {"id": f"q-{i:03d}", "task": row.task, "question": row.question, "answer": row.answer}
        for i, row in enumerate(rows)
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (FOLDER / "questions.jsonl").write_text(text, encoding="utf-8")


def write_bad_rows() -> None:
    """Good rows among bad ones, one of each kind that a job must turn into an error row."""
    too_long = 'Repeat this: "' + " ".join(["the quiet river"] * 700) + '"'
    lines: list[bytes] = [
        b'{"id": "good-1", "question": "Add 27 and 58.", "answer": "85"}',
        b'{"id": "broken-json", "question": "Add 1 and 2.", "answer": "3"',
        b'["not", "an", "object"]',
        b'{"id": "no-question", "answer": "85"}',
        b'{"id": "number", "question": 42, "answer": "42"}',
        b'{"id": "null", "question": null, "answer": ""}',
        b'{"id": "object", "question": {"text": "Add 1 and 2."}, "answer": "3"}',
        b'{"id": "good-2", "question": "Reverse the letters of \\"harbor\\".", "answer": "robrah"}',
        b'{"id": "empty", "question": "", "answer": ""}',
        b'{"id": "good-1", "question": "Add 3 and 4.", "answer": "7"}',
        b'{"id": "cold", "question": "Add 3 and 4.", "answer": "7", "sampling": {"temperature": -1}}',
        b'{"id": "bad-utf8", "question": "Repeat this: \\"caf\xe9\\"", "answer": "caf"}',
        json.dumps({"id": "long", "question": too_long, "answer": ""}).encode(),
        b'{"id": "good-3", "question": "Count from 3 to 9.", "answer": "3 4", "sampling": {"max_tokens": 4}}',
    ]
    (FOLDER / "bad_rows.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


# ---------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Score:
    """Whether greedy decoding gives the answer, and by how much the least certain of its tokens wins (in logits)."""

    is_exact: bool
    margin: float


def score(model: Lfm2ForCausalLM, batch: Batch) -> Score:
    """Greedy decoding gives the answer just when, after each part of the answer, its next token has the largest logit.

    So one forward over prompt and answer decides it: no cache, no generation loop.
    """
    with torch.inference_mode():
        logits, targets = forward(model, batch)
    logits = logits.float()
    right = logits.gather(1, targets[:, None]).squeeze(1)
    best_wrong = logits.scatter(1, targets[:, None], -math.inf).amax(dim=1)
    margin = float((right - best_wrong).min())
    return Score(margin > 0, margin)


def read_questions() -> list[Row]:
    """Read `questions.jsonl`."""
    lines = (FOLDER / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [Row(d["task"], d["question"], d["answer"], d["id"]) for d in map(json.loads, lines)]


def evaluate() -> None:
    """Print exact match and smallest margin of the folder on the held-out questions, a line per task."""
    rows = read_questions()
    hub_tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chat = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": rows[0].question}]
    rendered = hub_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == render(rows[0], "You are terse."), "the chat template and the training text differ"
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for dtype in (torch.float32, torch.bfloat16):
        model = Lfm2ForCausalLM.from_pretrained(MODEL, dtype=dtype)
        scores = defaultdict(list)
        for row in rows:
            result = score(model, make_batch([encode(tokenizer, row)]))
            scores[row.task].append(result)
            scores["all"].append(result)
        print(f"\n{dtype} arithmetic: task, exact match, smallest margin of an exact row")
        for task, results in scores.items():
            exact = [result for result in results if result.is_exact]
            margin = min((result.margin for result in exact), default=math.nan)
            print(f"  {task:8s} {len(exact):4d} / {len(results):3d}  {len(exact) / len(results):6.1%}  {margin:6.2f}")


def main() -> None:
    """Make everything, or only evaluate what is there."""
    parser = argparse.ArgumentParser(description="Train and write the sample model and rows.")
    parser.add_argument("--evaluate", action="store_true", help="only score the folder on the held-out questions")
    if not parser.parse_args().evaluate:
        torch.set_num_threads(1)  # a second thread gains a sixth at these sizes, and loses far more on a busy machine
        held_out = held_out_rows(300)
        rows = training_rows(held_out)
        rng = random.Random(SEED + 3)
        texts = [render(next(rows), rng.choice(SYSTEM_PROMPTS)) for _ in range(20_000)]
        tokenizer = train_tokenizer(texts)
        model = train_model(tokenizer, rows)
        write_tokenizer(tokenizer)
        write_model(model)
        write_questions(held_out)
        write_bad_rows()
    evaluate()


if __name__ == "__main__":
    main()
