"""Text to token ids and back, and the chat template, for every kind of checkpoint."""

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
        # Ids that decode to nothing under skip_special_tokens.
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
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
        """The default template's text."""
        template = self._templates.get("default")
        return template.text if template else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Special tokens written in `text` are recognized either way.

        add_special_tokens: also add those that the checkpoint puts around every text (bos).
        """
        # A batch of one: `encode` would hold the GIL, and with it every other thread.
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a chat; encode it without adding special tokens.

        tools: JSON descriptions; a checkpoint's own "tool_use" template is taken for them.
        chat_template: used instead of the checkpoint's; it can loop for long, so take it only from
          those who may keep this thread busy.
        kwargs: more variables for the template.

        Raises:
          RequestError: there is no template, or it does not accept these messages.
        """
        if chat_template is not None:
            template = self._custom(chat_template)
        else:
            name = "tool_use" if tools and "tool_use" in self._templates else "default"
            template = self._templates.get(name)
        if template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions or pass a chat_template.",
                param="messages",
            )
        variables = self.special_tokens | {"tools": tools} | kwargs
        return template.render(
            variables | {"messages": messages, "add_generation_prompt": add_generation_prompt}
        )

    def _custom(self, text: str) -> ChatTemplate:
        try:
            return ChatTemplate(text, "chat_template")
        except UserError as e:
            raise RequestError(e.problem, param="chat_template") from e

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)
