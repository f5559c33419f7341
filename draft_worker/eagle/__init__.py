"""EAGLE drafts: one decoder layer that reads the target's features."""
