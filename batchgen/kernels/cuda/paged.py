"""Launches paged attention for one layer and one step; see ``attention`` for what the kernels do."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.cuda import attention
from batchgen.kernels.cuda.tiles import num_tiles, power_of_two
from batchgen.kernels.inputs import KVCache, ModelInput

_LEAST_ROWS = 16  # of a matrix instruction
_PROMPT_ROWS = 128  # of a prompt's tile: arithmetic enough for every key it reads
_PROMPT_ROWS_FLOAT32 = 16  # which has no matrix instruction to feed, and taller tiles would spill registers
_MERGED_HEADS = 4
_STAGES = 5  # the pipeline's first two fetch the block table; the others are tiles of keys and values under way


class PagedAttention:
    """What all kernels of one step's attention are given; q is [num_tokens, num_heads, width].

    ``one_order``: prompts in tiles as high as a single token's, and no rounding left to the compiler's choice, so
    that a token's bits do not depend on whether it is computed by itself.
    """

    def __init__(self, q: Tensor, cache: KVCache, inputs: ModelInput, head_dim: int, one_order: bool) -> None:
        self.inputs = inputs
        self.head_dim = head_dim
        self.num_tokens, self.num_heads, width = q.shape
        self.num_kv_heads = cache.keys.shape[1]
        self.num_seqs, self.max_blocks = inputs.block_tables.shape
        self.num_spans = -(-self.max_blocks * cache.block_size // attention.SPAN)
        self.tensors = (q, cache.keys, cache.values, inputs.block_tables, inputs.positions, inputs.cu_seqlens)
        group = self.num_heads // self.num_kv_heads
        is_wide = cache.keys.element_size() == 4
        self.single_rows = max(_LEAST_ROWS, power_of_two(group))
        most = _PROMPT_ROWS_FLOAT32 if is_wide else _PROMPT_ROWS
        self.prompt_rows = self.single_rows if one_order else max(most, self.single_rows)
        self.sizes = {"SPAN": attention.SPAN, "HEAD_DIM": head_dim, "DIMS": max(16, power_of_two(head_dim))}
        self.layout = {
            "GROUP": group,
            "TILE": 32 if is_wide else 64,
            "WIDTH": width,
            "BLOCK_SIZE": cache.block_size,
            "LANES": cache.lanes,
            "RUN": min(cache.block_size & -cache.block_size, 16),  # the largest power of two in it, as far as it helps
        }
        self.options = {"num_stages": _STAGES, "enable_fp_fusion": not one_order}

    def single_tokens(self, out: Tensor) -> None:
        """Into ``out``, the sequences with one token in this step: their spans side by side, then merged."""
        device = out.device
        shape = (self.num_seqs, self.num_heads, self.num_spans)
        best, total = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        mixed = torch.empty(*shape, self.head_dim, dtype=torch.float32, device=device)
        attention.attend_one_token[(self.num_seqs, self.num_kv_heads, self.num_spans)](
            *(*self.tensors, best, total, mixed, self.num_heads, self.num_kv_heads, self.max_blocks, self.num_spans),
            ROWS=self.single_rows,
            **self.sizes,
            **self.layout,
            **self.options,
            num_warps=4,
        )
        attention.merge_spans[(self.num_seqs, -(-self.num_heads // _MERGED_HEADS))](
            *(best, total, mixed, self.inputs.positions, self.inputs.cu_seqlens, out, self.num_heads, self.num_spans),
            ROWS=_MERGED_HEADS,
            **self.sizes,
            **self.options,
            num_warps=2,
        )

    def prompts(self, out: Tensor) -> None:
        """Into ``out``, the sequences with several tokens in this step, in tiles of (token, head)."""
        tokens = self.prompt_rows // self.layout["GROUP"]
        grid = (num_tiles(self.num_tokens, self.num_seqs, tokens), self.num_kv_heads)
        attention.attend_tile[grid](
            *(*self.tensors, out, self.num_seqs, self.num_heads, self.num_kv_heads, self.max_blocks),
            ROWS=self.prompt_rows,
            TOKENS=tokens,
            **self.sizes,
            **self.layout,
            **self.options,
            num_warps=4 if self.prompt_rows < 128 else 8,
        )
