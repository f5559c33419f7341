"""Text to ids and back: prompts, chat templates, and output that grows token by token."""

from coordinator.text.codec import TextCodec
from coordinator.text.detokenizer import Detokenizer
from coordinator.text.template import ChatMessage, ChatTemplate

__all__ = ["ChatMessage", "ChatTemplate", "Detokenizer", "TextCodec"]
