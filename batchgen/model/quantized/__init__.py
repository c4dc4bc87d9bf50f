"""Quantized models that exist, read back into the dtype of the model, one tensor at a time.

A format costs memory as it is read, not as it is stored: what a model computes with is the business of its dtype.
"""
