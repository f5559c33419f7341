"""Mode and proposal length of each round, from what the rounds before have shown."""

from coordinator.control.controller import Choice, Controller
from coordinator.control.estimates import Shared
from coordinator.control.seen import Answer, RoundSeen

__all__ = ["Answer", "Choice", "Controller", "RoundSeen", "Shared"]
