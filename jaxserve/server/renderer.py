"""Chat messages and prompts to token ids, in a thread pool, never on the event loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.errors import RequestError
from jaxserve.server.protocol import ChatCompletionRequest, ChatMessage, ContentPart

MAX_PROMPTS = 2048
_NUM_THREADS = 2
_ROLES = ("system", "developer", "user", "assistant")
# What the template call itself sets; chat_template_kwargs are variables of the template only.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    ("add_generation_prompt", "chat_template", "documents", "messages", "tokenize", "tools")
)


class Renderer:
    """Turns what clients write into token ids. Close it to end its threads."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="renderer")

    async def chat(self, request: ChatCompletionRequest) -> list[int]:
        """The token ids of a chat.

        Raises:
          RequestError: the messages cannot be rendered.
        """
        return await self._in_thread(
            lambda: render_chat(
                self._tokenizer,
                request.messages,
                add_generation_prompt=request.add_generation_prompt is not False,
                add_special_tokens=bool(request.add_special_tokens),
                template_kwargs=request.chat_template_kwargs or {},
            )
        )

    async def completion(
        self, prompt: str | list[str | int | list[int]], *, add_special_tokens: bool
    ) -> list[tuple[list[int], str]]:
        """The token ids of each prompt, and its path in the body.

        Raises:
          RequestError: the prompt mixes text and tokens, or is empty.
        """
        return await self._in_thread(
            lambda: render_prompts(self._tokenizer, prompt, add_special_tokens=add_special_tokens)
        )

    def close(self) -> None:
        """Ends the threads when they are done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _in_thread[T](self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    add_special_tokens: bool,
    template_kwargs: Mapping[str, Any],
) -> list[int]:
    """Applies the chat template and tokenizes the result.

    add_special_tokens: also those that the checkpoint puts around every text, which templates
      mostly write themselves.  template_kwargs: more variables for the template.

    Raises:
      RequestError: the messages cannot be rendered.
    """
    if not messages:
        raise RequestError("messages must not be empty.", param="messages")
    rendered = [_template_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    for name in template_kwargs:
        if name in _RESERVED_TEMPLATE_KWARGS:
            raise RequestError(
                f"chat_template_kwargs cannot set {name}.", param=f"chat_template_kwargs.{name}"
            )
    try:
        text = tokenizer.apply_chat_template(
            rendered, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
    except RequestError:
        raise
    except Exception as error:  # the template is a program, and the client's data runs it
        raise RequestError(
            f"The chat template does not accept these messages: {error!r}", param="messages"
        ) from error
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _template_message(message: ChatMessage, path: str) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise RequestError(
            f"{path}.role must be one of {', '.join(_ROLES)}, got {message.role[:100]!r}.",
            param=f"{path}.role",
        )
    for name in ("tool_calls", "tool_call_id", "function_call", "audio", "refusal"):
        if getattr(message, name) not in (None, []):
            raise RequestError(
                f"{path}.{name} is not supported by this version of jaxserve.",
                param=f"{path}.{name}",
            )
    rendered = {"role": message.role, "content": _content_text(message.content, f"{path}.content")}
    if message.name is not None:
        rendered["name"] = message.name
    if message.reasoning_content is not None:
        rendered["reasoning_content"] = message.reasoning_content
    return rendered


def _content_text(content: str | list[ContentPart] | None, path: str) -> str:
    """The text of a message; text parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    if not content:
        raise RequestError(f"{path} must be a string or a list of text parts.", param=path)
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            raise RequestError(
                f"{path}[{i}].type: this model takes text only, got {part.type[:100]!r}.",
                param=f"{path}[{i}].type",
            )
        if part.text is None:
            raise RequestError(f"{path}[{i}].text is missing.", param=f"{path}[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)


def render_prompts(
    tokenizer: Tokenizer,
    prompt: str | Sequence[str | int | list[int]],
    *,
    add_special_tokens: bool,
) -> list[tuple[list[int], str]]:
    """Token ids of each prompt, and its path: text is tokenized, token ids are taken as they are.

    Raises:
      RequestError: the prompt mixes text and tokens, or is empty.
    """
    if isinstance(prompt, str):
        return [(tokenizer.encode(prompt, add_special_tokens=add_special_tokens), "prompt")]
    if not prompt:
        raise RequestError("prompt must not be empty.", param="prompt")
    kind = type(prompt[0])
    for i, item in enumerate(prompt):
        if type(item) is not kind:
            raise RequestError(
                "prompt must be a string, a list of strings, token ids, or a list of lists of "
                "token ids, not a mixture.",
                param=f"prompt[{i}]",
            )
    if kind is int:
        return [([item for item in prompt if isinstance(item, int)], "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt takes up to {MAX_PROMPTS} prompts, got {len(prompt)}.", param="prompt"
        )
    rendered = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            item = tokenizer.encode(item, add_special_tokens=add_special_tokens)
        assert isinstance(item, list)
        rendered.append((item, f"prompt[{i}]"))
    return rendered
