"""Quantized models that exist, read back into the dtype of the model, one tensor at a time.

Weights take the memory of the model's dtype once they are loaded, however few bits the file has for each.
"""
