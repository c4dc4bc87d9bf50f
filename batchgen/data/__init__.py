"""Rows in, rows out: readers, prompts and tokenizer on one side, journal and writers on the other.

Nothing in here imports the engine or a model, so that inputs can be planned and outputs finalized without torch.
"""
