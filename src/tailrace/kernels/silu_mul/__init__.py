"""The gated activation of the feed-forward block: silu(gate) * up."""
