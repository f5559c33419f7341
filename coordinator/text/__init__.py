"""Text to ids and back: prompts, chat templates, and output that grows token by token."""

from coordinator.text.codec import TextCodec
from coordinator.text.detokenizer import Detokenizer
from coordinator.text.template import ChatMessage, ChatTemplate, Message
from coordinator.text.turns import Conversation, Prompt

__all__ = ["ChatMessage", "ChatTemplate", "Conversation", "Detokenizer", "Message", "Prompt", "TextCodec"]
