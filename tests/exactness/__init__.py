"""The promise, proved by enumeration: what is emitted has exactly the target's law."""
