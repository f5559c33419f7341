"""`splitspec train`: data written by the target itself, and drafts trained on it."""
