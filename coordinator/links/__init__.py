"""The coordinator's two streams of a request: one to the target worker, one to the draft worker."""

from coordinator.links.draft import DraftLink
from coordinator.links.target import TargetLink

__all__ = ["DraftLink", "TargetLink"]
