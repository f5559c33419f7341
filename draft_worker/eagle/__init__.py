"""EAGLE drafts: one decoder layer that reads the target's features."""

from pathlib import Path

#: The trained draft of the demo model, which comes with the package: the checkpoint "demo".
DEMO = Path(__file__).parent / "smollm2-135m-instruct"
