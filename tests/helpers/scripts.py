"""Two hundred texts of many scripts, for tests of tokenizers."""

from __future__ import annotations

import random

# ruff: noqa: RUF001 - letters of all alphabets
WRITTEN = (
    "The quick brown fox¦it's they'RE we'll I'd¦naïve café¦e\u0301 a\u030a ﬁ ①¦Straße ẞ¦İstanbul ıI¦東京都に住む¦"
    "你好，世界！¦안녕하세요¦สวัสดีชาวโลก¦नमस्ते दुनिया¦مرحبا بالعالم¦שלום עולם¦Привет, мир¦Γειά¦"
    "🙂🙃¦👩‍👩‍👧‍👦 🏳️‍🌈¦👍🏽¦🇨🇭🇯🇵¦"
    "def f(x):\n\treturn x ** 2  # ok¦if (a && b) { c[0] += 1; }\r\n¦<div class='a'>¦ ¦  ¦\t¦\n¦\n\n\n¦   \n  ¦"
    "\r\n\r\n¦\u00a0\u2003\u200b¦0¦42¦1234567890¦3.14159¦1,000¦²³½¦٣٤٥¦...¦!?!?¦——¦http://a.b/c?d=e&f¦a_b-c.d¦\0\x07¦\ufeff¦𝒳𐍈¦"
    "aaaaaaaaaaaaaaaaaaaaaa¦<|im_start|>¦<|eot_id|>¦<think>\n¦</think>\n\n"
)
PIECES = WRITTEN.split("¦")


def texts() -> list[str]:
    """Two hundred texts: every piece, and mixtures of them."""
    draw = random.Random(7)
    mixed = ["".join(draw.choices(PIECES, k=draw.randrange(2, 12))) for _ in range(200 - len(PIECES))]
    return [*PIECES, *mixed]
