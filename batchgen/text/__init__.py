"""Text to token ids and back: tokenizer, chat templates, stop strings. Imports no torch."""
