"""The decoder that all supported architectures are variants of."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.model.attention import Attention
from engine.model.config import ModelConfig
from engine.model.layers import Embedding, GatedMLP, Linear, NamedTensor, Norm
from engine.model.rotary import RopeShape, rotary_table


class DecoderLayer:
    """Attention, then MLP, each on a norm of the residual stream."""

    def __init__(self, config: ModelConfig, window: int | None, dtype: torch.dtype) -> None:
        self.attention_norm = Norm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.attention = Attention(config, window, dtype)
        self.mlp_norm = Norm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype)

    def tensors(self, prefix: str) -> Iterator[NamedTensor]:
        yield from self.attention_norm.tensors(f"{prefix}input_layernorm.")
        yield from self.attention.tensors(f"{prefix}self_attn.")
        yield from self.mlp_norm.tensors(f"{prefix}post_attention_layernorm.")
        yield from self.mlp.tensors(f"{prefix}mlp.")

    def linears(self) -> Iterator[Linear]:
        yield from self.attention.linears()
        yield from self.mlp.linears()


class Decoder:
    """
    Token ids to logits.

    Args:
        config: Its shape.
        max_model_len: Longest sequence; sizes the rotary table.
        dtype: Of weights and activations.
        device: Where they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    ) -> None:
        self.config = config
        self.dtype = dtype
        with device:
            self._make_layers()
        # made on the CPU whatever the device: the angles' bits are those of transformers there
        table = rotary_table(
            RopeShape(
                rope=config.rope,
                rotary_dim=int(config.head_dim * config.rope.get("partial_rotary_factor", 1.0)),
                max_positions=config.max_positions,
                max_model_len=max_model_len,
            )
        )
        self.rotary_table = table.to(device)

    def _make_layers(self) -> None:
        config, dtype = self.config, self.dtype
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = [DecoderLayer(config, window, dtype) for window in config.windows]
        self.norm = Norm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, bias=False, dtype=dtype)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self, batch: ForwardBatch, kv_caches: Sequence[Tensor], kv_scales: Sequence[Tensor] | None = None
    ) -> Tensor:
        """
        Run a batch, writing its keys and values to the caches.

        Args:
            kv_caches: Per layer [2, num_blocks, num_kv_heads, block_size, head_dim].
            kv_scales: Per layer [2, num_blocks, num_kv_heads, block_size] float32, of caches of eight bits.

        Returns:
            [num_tokens, hidden_size], before the last norm: what `logits` takes rows of.
        """
        residual = self.embedding.forward(batch.input_ids)
        cos, sin = self.rotary_table.index_select(0, batch.positions).chunk(2, dim=1)
        delta: Tensor | None = None
        scales = [None] * len(self.layers) if kv_scales is None else kv_scales
        for layer, kv_cache, layer_scales in zip(self.layers, kv_caches, scales, strict=True):
            norm = layer.attention_norm
            hidden = norm.forward(residual) if delta is None else norm.add_forward(delta, residual)
            delta = layer.attention.forward(hidden, batch, (cos, sin), kv_cache, layer_scales)
            delta = layer.mlp.forward(layer.mlp_norm.add_forward(delta, residual))
        return residual if delta is None else residual.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] of `forward` to [num_rows, vocab_size]; at least one row."""
        return self.head.forward(self.norm.forward(hidden))

    def tensors(self) -> Iterator[NamedTensor]:
        """Every tensor of the checkpoint by its name there, as the memory it is loaded into."""
        yield from self.embedding.tensors("model.embed_tokens.")
        for index, layer in enumerate(self.layers):
            yield from layer.tensors(f"model.layers.{index}.")
        yield from self.norm.tensors("model.norm.")
        if not self.config.tied_embeddings:
            yield from self.head.tensors("")

    def pack(self) -> None:
        """Lay the loaded weights out for the device, one by one: two copies of all would not fit."""
        for layer in self.layers:
            for linear in layer.linears():
                linear.pack()
        self.head.pack()
