"""Mode and proposal length of each round, from what the rounds before have shown."""

from coordinator.control.controller import Choice, Controller
from coordinator.control.seen import Answer, RoundSeen
from coordinator.control.shared import Shared

__all__ = ["Answer", "Choice", "Controller", "RoundSeen", "Shared"]
