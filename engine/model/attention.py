"""Grouped-query attention over paged keys and values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.model.config import ModelConfig
from engine.model.layers import Linear, NamedTensor
from kernels.decode_attention import decode_attention
from kernels.newest_token import rotate_and_attend, rotates_inside
from kernels.prefill_attention import prefill_attention
from kernels.rope import HeadNorms, rope_and_store

# cosines and sines as kernels.rope reads them
Rotation = tuple[Tensor, Tensor]


class Attention:
    """
    One layer's attention.

    Args:
        window: Tokens that a token sees, itself among them; None is all before it.
    """

    def __init__(self, config: ModelConfig, window: int | None, dtype: torch.dtype) -> None:
        self.num_heads = config.num_heads
        self.window = window
        self.scale = config.head_dim**-0.5

        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = Linear(config.hidden_size, parts, bias=config.qkv_bias, dtype=dtype)
        self.output = Linear(query_size, {"o_proj": config.hidden_size}, bias=config.output_bias, dtype=dtype)
        self.norms: HeadNorms | None = None
        if config.qk_norm:
            query_weight, key_weight = (torch.empty(config.head_dim, dtype=dtype) for _ in range(2))
            self.norms = HeadNorms(query_weight, key_weight, config.norm_eps)

    def forward(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        rotation: Rotation,
        kv_cache: Tensor,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """
        Attend, and write this layer's keys and values of the batch to the cache.

        Args:
            hidden: [num_tokens, hidden_size], normed.
            rotation: Cosines and sines of the batch's positions, each [num_tokens, 1, rotary_dim].
            kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim], of this layer.
            kv_scales: [2, num_blocks, num_kv_heads, block_size] float32, of a cache of eight bits.
        """
        qkv = self.qkv.forward(hidden)
        plan = None if batch.prefill else batch.decode[self.window]
        rotary_dim = rotation[0].shape[2]
        if plan is not None and rotates_inside(plan, kv_cache, qkv.dtype, self.num_heads, rotary_dim, self.norms):
            attended = rotate_and_attend(qkv, rotation, batch.slot_mapping, kv_cache, plan, self.num_heads, self.scale)
        else:
            attended = self._rotate_then_attend(qkv, batch, rotation, kv_cache, kv_scales)
        return self.output.forward(attended.view(len(attended), -1))

    def _rotate_then_attend(
        self, qkv: Tensor, batch: ForwardBatch, rotation: Rotation, kv_cache: Tensor, kv_scales: Tensor | None
    ) -> Tensor:
        query, key, value = rope_and_store(
            qkv, rotation, batch.slot_mapping, kv_cache, self.num_heads, self.norms, kv_scales
        )
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        split = batch.num_decodes
        if batch.decode:
            plan = batch.decode[self.window]
            decode_attention(query[:split], kv_cache, plan, self.scale, kv_scales=kv_scales, out=attended[:split])
        if batch.prefill:
            fresh = query[split:], key[split:], value[split:]
            chunks = batch.prefill[self.window]
            prefill_attention(*fresh, kv_cache, chunks, self.scale, kv_scales=kv_scales, out=attended[split:])
        return attended

    def tensors(self, prefix: str) -> Iterator[NamedTensor]:
        yield from self.qkv.tensors(prefix)
        yield from self.output.tensors(prefix)
        if self.norms is not None:
            yield f"{prefix}q_norm.weight", self.norms.query
            yield f"{prefix}k_norm.weight", self.norms.key

    def linears(self) -> Iterator[Linear]:
        yield self.qkv
        yield self.output
