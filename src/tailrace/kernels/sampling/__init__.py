"""Drawing token ids from logits without a sort of the vocabulary."""
