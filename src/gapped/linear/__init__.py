"""Logits of a linear layer in front of a choice, never all held: chunks of rows, and the choice from them."""
