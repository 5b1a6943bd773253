"""Grouped-query attention over paged keys and values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.model.config import ModelConfig
from engine.model.layers import Linear, NamedTensor, Norm
from kernels.decode_attention import decode_attention
from kernels.prefill_attention import prefill_attention
from kernels.rope import rope_and_store

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
        self.head_dim = config.head_dim
        self.window = window
        self.scale = config.head_dim**-0.5

        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = Linear(config.hidden_size, parts, bias=config.qkv_bias, dtype=dtype)
        self.output = Linear(query_size, {"o_proj": config.hidden_size}, bias=config.output_bias, dtype=dtype)
        self.norms: tuple[Norm, Norm] | None = None
        if config.qk_norm:
            query_norm = Norm(config.head_dim, eps=config.norm_eps, dtype=dtype)
            key_norm = Norm(config.head_dim, eps=config.norm_eps, dtype=dtype)
            self.norms = (query_norm, key_norm)
        self.eps = config.norm_eps

    def forward(self, hidden: Tensor, batch: ForwardBatch, rotation: Rotation, kv_cache: Tensor) -> Tensor:
        """
        Attend, and write this layer's keys and values of the batch to the cache.

        Args:
            hidden: [num_tokens, hidden_size], normed.
            rotation: Cosines and sines of the batch's positions, each [num_tokens, 1, rotary_dim].
            kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim], of this layer.
        """
        query, key, value = rope_and_store(
            self.qkv.forward(hidden),
            *rotation,
            batch.slot_mapping,
            kv_cache,
            num_heads=self.num_heads,
            norms=None if self.norms is None else (self.norms[0].weight, self.norms[1].weight),
            eps=self.eps,
        )
        attended = []
        split = batch.num_decodes
        if decode := batch.decode:
            plan = decode.plans[self.window]
            attended.append(
                decode_attention(
                    query[:split], kv_cache, decode.block_tables, decode.seq_lens, self.scale, self.window, plan
                )
            )
        if prefill := batch.prefill:
            attended.append(
                prefill_attention(
                    query[split:],
                    key[split:],
                    value[split:],
                    kv_cache,
                    prefill.block_tables,
                    prefill.query_start,
                    prefill.seq_lens,
                    self.scale,
                    self.window,
                    prefill.plans[self.window],
                )
            )
        rows = attended[0] if len(attended) == 1 else torch.cat(attended)
        return self.output.forward(rows.view(len(rows), -1))

    def tensors(self, prefix: str) -> Iterator[NamedTensor]:
        yield from self.qkv.tensors(prefix)
        yield from self.output.tensors(prefix)
        if self.norms is not None:
            yield from self.norms[0].tensors(f"{prefix}q_norm.")
            yield from self.norms[1].tensors(f"{prefix}k_norm.")

    def linears(self) -> Iterator[Linear]:
        yield self.qkv
        yield self.output
