"""The model's chat template, applied to messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from runner.config import ConfigError, PromptConfig
from runner.control_tokens import ControlTokens
from runner.prompt_literals import rewrite_literals
from runner.row_problem import RowProblem

# Arguments of `apply_chat_template` that would change what it returns, not what the template sees.
_RESERVED_KWARGS = frozenset(
    {"conversation", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs"}
)


class Chat:
    """Writes messages as the text of a chat that the model is to continue.

    `system` is put in front of messages that have no system message of their own; `kwargs` go to the
    tokenizer's `apply_chat_template` (the template sees those it does not know). With `control`, the control
    tokens that the template, `system` and `kwargs` write are aliased in the text, those of messages are not.
    """

    def __init__(
        self, tokenizer: Any, system: str | None, kwargs: Mapping[str, Any], control: ControlTokens | None
    ) -> None:
        reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
        if reserved:
            raise ConfigError("prompt.chat_kwargs", reserved, "arguments of the chat template, not of tokenisation")
        self._tokenizer = tokenizer
        self._control = control
        self._system = system
        self._kwargs = {"add_generation_prompt": not kwargs.get("continue_final_message", False), **kwargs}
        if control is not None:
            self._system = None if system is None else control.alias(system)
            self._kwargs = control.alias_within({**tokenizer.special_tokens_map, **self._kwargs})
            self._kwargs["chat_template"] = _aliased_template(tokenizer, kwargs, control)

    def render(self, prompt: str | list[dict[str, Any]]) -> str:
        """The text of a chat: of messages, or of one user message.

        Raises:
            RowProblem: the template refuses the messages; with the template's own words.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system is not None and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        text = self._apply(messages)
        if self._control is not None and self._control.spelled_in(text):
            return self._alias_roles(text, messages, self._control)
        return text

    def _apply(self, messages: list[dict[str, Any]]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **self._kwargs)
        # The template is the model's code and can fail on messages in any way.
        except Exception as error:
            raise RowProblem(f"the model's chat template refuses the messages: {error}") from error
        return text

    def _alias_roles(self, text: str, messages: list[dict[str, Any]], control: ControlTokens) -> str:
        """The text with aliases also for control tokens that the template composes, as of `'<|' + role + '|>'`.

        Those are the ones that are still spelled when every value is hidden but for its words.
        """
        hidden = self._apply(control.hide(messages))
        aliased = control.alias_composed(hidden, [message["role"] for message in messages])
        if aliased == hidden:
            return text
        shown = control.show(aliased)
        if control.unalias(shown) != control.unalias(text):
            raise RowProblem(
                "the model's chat template makes control tokens of roles and also computes with the text of the "
                "messages, so that control tokens spelled in them cannot be kept apart; remove them from the row"
            )
        return shown


def _aliased_template(tokenizer: Any, kwargs: Mapping[str, Any], control: ControlTokens) -> str:
    """The chat template in effect, writing aliases."""
    given = kwargs.get("chat_template")
    try:
        template = tokenizer.get_chat_template(given, kwargs.get("tools"))
        # As transformers compiles it, but for the last newline, which it drops when it gets the result.
        environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
        return rewrite_literals(template, environment, control.alias)
    except TemplateSyntaxError as error:
        accepted = f"a Jinja template; line {error.lineno}: {error.message}"
        raise ConfigError("prompt.chat_kwargs.chat_template", given, accepted) from error
    except ValueError as error:
        raise ConfigError("prompt.chat_kwargs.chat_template", given, str(error)) from error


def open_chat(config: PromptConfig, tokenizer: Any, control: ControlTokens | None) -> Chat | None:
    """The chat that is in effect for a job whose prompts are text, None where text is used as it is.

    For `control`, see `Chat`.

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
        return Chat(tokenizer, config.system, config.chat_kwargs, control)
    why = "the tokenizer has no chat template" if not has_template else "prompt.chat is never"
    if config.system is not None:
        raise ConfigError("prompt.system", config.system, f"null, because {why}")
    if config.chat_kwargs:
        raise ConfigError("prompt.chat_kwargs", config.chat_kwargs, f"nothing, because {why}")
    return None
