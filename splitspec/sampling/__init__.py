"""Logits to distributions, and counter-based randomness."""
