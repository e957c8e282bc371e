"""Text to token ids and back, and the chat template, for every kind of checkpoint."""

import copy
from collections.abc import Mapping
from typing import Any

import tokenizers

from jaxserve.checkpoint.chat_template import ChatTemplate
from jaxserve.errors import RequestError, UserError


class Tokenizer:
    """A tokenizer and what its checkpoint says about special tokens and chats.

    special_tokens: strings by role, such as {"bos_token": "<s>", "eos_token": "</s>"}.
    Encoding and decoding may run on several threads at once.

    Raises:
      UserError: a special token is not in the vocabulary, or a chat template is not valid.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        source: str,
    ):
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        for role, token in self.special_tokens.items():
            if backend.token_to_id(token) is None:
                raise UserError(
                    f"{source}: the {role} {token!r} is not in the vocabulary.",
                    fix="Use a checkpoint whose tokenizer files belong together.",
                )
        added = backend.get_added_tokens_decoder()
        # Those that decode to nothing under skip_special_tokens.
        self.special_token_ids = {t.content: i for i, t in added.items() if t.special}
        self.special_ids = frozenset(self.special_token_ids.values())
        self._templates = {
            name: ChatTemplate(text, f"{source}: chat template {name!r}")
            for name, text in chat_templates.items()
        }

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones too; the model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def chat_template(self) -> str | None:
        """The text of the template of a chat without tools."""
        template = self._templates.get("default")
        return template.text if template else None

    @property
    def template_names(self) -> frozenset[str]:
        """Every variable that one of the chat templates reads."""
        return frozenset().union(*(t.variables for t in self._templates.values()))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Special tokens written in `text` are recognized either way.

        add_special_tokens: also add those that the checkpoint puts around every text (bos).
        """
        # A batch of one: `encode` would hold the GIL, and with it every other thread.
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def with_chat_template(self, text: str, source: str) -> "Tokenizer":
        """The same tokenizer with one chat template, for chats with tools too.

        Raises:
          UserError: it is not valid Jinja; `source` says where it comes from.
        """
        other = copy.copy(self)
        other._templates = {"default": ChatTemplate(text, source)}
        return other

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a chat; encode it without adding special tokens.

        tools: JSON descriptions; a checkpoint's own "tool_use" template is taken for them.
        kwargs: more variables for the template.

        Raises:
          RequestError: there is no template, or it does not accept these messages.
        """
        return self.chat_template_for(has_tools=bool(tools)).render(
            self.template_variables(
                messages, {"tools": tools} | kwargs, add_generation_prompt=add_generation_prompt
            )
        )

    def chat_template_for(self, *, has_tools: bool) -> ChatTemplate:
        """The template of a chat without or with tools.

        Raises:
          RequestError: there is none.
        """
        name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise RequestError(
                "This model has no chat template: start the server with --chat-template, or use "
                "/v1/completions.",
                param="messages",
            )
        return template

    def template_variables(
        self,
        messages: list[dict[str, Any]],
        others: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> dict[str, Any]:
        """What a chat template is rendered with."""
        variables = {**self.special_tokens, **others}
        return variables | {"messages": messages, "add_generation_prompt": add_generation_prompt}

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)
