"""GGUF files: their config and their blocks, read back into the dtype of the model, one tensor at a time."""
