"""The model's chat template, applied to messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.config import ConfigError, PromptConfig
from runner.row_problem import RowProblem

# Arguments of `apply_chat_template` that would change what it returns, not what the template sees.
_RESERVED_KWARGS = frozenset(
    {"conversation", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs"}
)


class Chat:
    """Writes messages as the text of a chat that the model is to continue.

    `system` is put in front of messages that have no system message of their own; `kwargs` go to the
    tokenizer's `apply_chat_template` (the template sees those it does not know).
    """

    def __init__(self, tokenizer: Any, system: str | None, kwargs: Mapping[str, Any]) -> None:
        reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
        if reserved:
            raise ConfigError("prompt.chat_kwargs", reserved, "arguments of the chat template, not of tokenisation")
        self._tokenizer = tokenizer
        self._system = system
        self._kwargs = {"add_generation_prompt": not kwargs.get("continue_final_message", False), **kwargs}

    def render(self, prompt: str | list[dict[str, Any]]) -> str:
        """The text of a chat: of messages, or of one user message.

        Raises:
            RowProblem: the template refuses the messages; with the template's own words.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system is not None and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **self._kwargs)
        # The template is the model's code and can fail on messages in any way.
        except Exception as error:
            raise RowProblem(f"the model's chat template refuses the messages: {error}") from error
        return text


def open_chat(config: PromptConfig, tokenizer: Any) -> Chat | None:
    """The chat that is in effect for a job whose prompts are text, None where text is used as it is.

    Raises:
        ConfigError: a chat is needed and the model has no template, or keys of a chat are set without one.
    """
    has_template = bool(tokenizer.chat_template) or "chat_template" in config.chat_kwargs
    if not has_template:
        accepted = "this only with a model whose tokenizer has a chat template; this one has none"
        if config.messages_column is not None:
            raise ConfigError("prompt.messages_column", config.messages_column, accepted)
        if config.chat == "always":
            raise ConfigError("prompt.chat", config.chat, accepted)
    if config.messages_column is not None and config.chat == "never":
        raise ConfigError("prompt.chat", config.chat, "auto or always with prompt.messages_column")
    if has_template and config.chat != "never":
        return Chat(tokenizer, config.system, config.chat_kwargs)
    why = "the tokenizer has no chat template" if not has_template else "prompt.chat is never"
    if config.system is not None:
        raise ConfigError("prompt.system", config.system, f"null, because {why}")
    if config.chat_kwargs:
        raise ConfigError("prompt.chat_kwargs", config.chat_kwargs, f"nothing, because {why}")
    return None
