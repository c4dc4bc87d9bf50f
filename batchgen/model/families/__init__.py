"""Model families, one module each: the parser of ``config.json``, tensor names and published shapes.

To add a family, write a module with the names of ``registry.Family`` and enter it in ``registry.FAMILIES``. The decoder
has SwiGLU, grouped-query attention with per-head norms of queries and keys and no bias, an unscaled rotary embedding,
and short convolutions; a family with other parts extends ``layers`` and the kernels too. The sampling values that a
model's card recommends are in ``config.sampling``.
"""
