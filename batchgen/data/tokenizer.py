"""Former place of ``batchgen.text.tokenizer.Tokenizer``; scripts that import it from here keep working."""

from batchgen.text.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
