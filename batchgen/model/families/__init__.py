"""Model families, one module each: the parser of ``config.json``, tensor names and published shapes.

To add a family, write a module with the names of ``registry.Family``, enter it in ``registry.FAMILIES`` and add a tiny
config to ``tests/helpers/families.py``: all tests that hold for every family then run for it. The decoder has SwiGLU,
grouped-query attention without bias, optionally with norms per head of queries and keys, and short convolutions; what
else there is, the fields of ``ModelConfig`` and ``LayerShape`` tell. ``dense`` reads what looks like Llama.
"""
