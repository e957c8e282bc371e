"""Chat messages and prompts to token ids, in a thread pool, never on the event loop."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.errors import RequestError
from jaxserve.server.protocol.chat import ChatCompletionRequest, ChatMessage, ContentPart

MAX_PROMPTS = 2048
_NUM_THREADS = 2
_BATCH = 4
_USUAL_CHARS_PER_TOKEN = 16
_ROLES = ("system", "developer", "user", "assistant")
# What the template call itself sets; chat_template_kwargs are variables of the template only.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    ("add_generation_prompt", "chat_template", "documents", "messages", "tokenize", "tools")
)


class Renderer:
    """Turns what clients write into token ids. Close it to end its threads."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int):
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
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
                max_model_len=self._max_model_len,
            )
        )

    async def completion(
        self, prompt: str | list[str | int | list[int]], *, add_special_tokens: bool
    ) -> list[tuple[list[int], str]]:
        """The token ids of each prompt, and its path in the body.

        Raises:
          RequestError: the prompt mixes text and tokens, or is empty.
        """
        rendered = render_prompts(
            self._tokenizer,
            prompt,
            add_special_tokens=add_special_tokens,
            max_model_len=self._max_model_len,
        )
        prompts = []
        # A few at a time: other requests get their turn, and a shutdown need not wait for all.
        while some := await self._in_thread(lambda: list(itertools.islice(rendered, _BATCH))):
            prompts += some
        return prompts

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
    max_model_len: int,
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
    return _encode(tokenizer, text, add_special_tokens, max_model_len, "messages")


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
    max_model_len: int,
) -> Iterator[tuple[list[int], str]]:
    """Token ids of each prompt, and its path: text is tokenized, token ids are taken as they are.

    Raises:
      RequestError: the prompt mixes text and tokens, or is empty, or a text is far too long.
    """
    if isinstance(prompt, str):
        yield _encode(tokenizer, prompt, add_special_tokens, max_model_len, "prompt"), "prompt"
        return
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
        yield [item for item in prompt if isinstance(item, int)], "prompt"
        return
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt takes up to {MAX_PROMPTS} prompts, got {len(prompt)}.", param="prompt"
        )
    for i, item in enumerate(prompt):
        path = f"prompt[{i}]"
        if isinstance(item, str):
            item = _encode(tokenizer, item, add_special_tokens, max_model_len, path)
        assert isinstance(item, list)
        yield item, path


def _encode(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, max_model_len: int, path: str
) -> list[int]:
    """Tokenizes, but gives up early on a text that is far too long: megabytes take seconds.

    Longer and longer beginnings are tried. One with twice the tokens that fit settles it: the rest
    of the text can change the tokens near the cut, but not halve their number.
    """
    num_chars = _USUAL_CHARS_PER_TOKEN * max_model_len
    while num_chars < len(text):
        if len(tokenizer.encode(text[:num_chars], add_special_tokens=False)) > 2 * max_model_len:
            raise RequestError(
                f"The prompt has more than {2 * max_model_len} tokens; this model takes at most "
                f"{max_model_len} tokens, prompt and output together.",
                param=path,
            )
        num_chars *= 2
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
