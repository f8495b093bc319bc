"""Llama 2 and 3, and what shares their shape, such as SmolLM2.

Plain pre-norm decoder: grouped-query attention with rotary positions, a gated MLP, RMS norms.
Biases, the tied head and Llama 3's rotary scaling are the config's choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.models.layers import Decoder, DecoderLayer

if TYPE_CHECKING:
    from tailrace.kernels.rotary import Rotary
    from tailrace.models.builder import Builder


def build(builder: Builder) -> Decoder:
    """Put the model together."""
    config = builder.config
    rotary = builder.rotary()
    embedding, head = builder.embedding_and_head("model.embed_tokens.weight", "lm_head.weight")
    return Decoder(
        config=config,
        kernels=builder.kernels,
        embedding=embedding,
        layers=builder.layers(lambda at: _layer(builder, at, rotary)),
        final_norm=builder.norm("model.norm.weight", config.hidden_size),
        head=head,
    )


def _layer(builder: Builder, at: str, rotary: Rotary) -> DecoderLayer:
    hidden = builder.config.hidden_size
    return DecoderLayer(
        attention_norm=builder.norm(f"{at}.input_layernorm.weight", hidden),
        attention=builder.attention(f"{at}.self_attn", rotary),
        mlp_norm=builder.norm(f"{at}.post_attention_layernorm.weight", hidden),
        mlp=builder.mlp(f"{at}.mlp"),
    )
