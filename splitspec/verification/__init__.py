"""Verification rules as pure functions: one file each."""
