"""Chat messages and prompts to token ids, in a thread pool, never on the event loop."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.errors import RequestError
from jaxserve.server.chat_messages import Continuation, template_messages
from jaxserve.server.protocol.chat import ChatCompletionRequest, ChatMessage
from jaxserve.server.template_process import TemplateProcess
from jaxserve.server.tool_choice import plan_tools

MAX_PROMPTS = 2048
_NUM_THREADS = 2
_BATCH = 4
_TAIL_LEN = 256
_USUAL_CHARS_PER_TOKEN = 16
# What other fields of the request set; chat_template_kwargs are the template's other variables.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "documents",
        "messages",
        "tokenize",
        "tools",
    )
)

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# From a template's text, its variables and those it must read (`check_takes`) to the prompt's text.
type RenderTemplate = Callable[[str, Mapping[str, Any], Mapping[str, str]], str]


@dataclass(frozen=True)
class RenderedChat:
    """tail: the last characters of the prompt's text."""

    token_ids: list[int]
    tail: str


class Renderer:
    """Turns what clients write into token ids. Close it to end its threads.

    default_template_kwargs: variables of chat templates that a request can set otherwise.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        default_template_kwargs: Mapping[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._default_template_kwargs = default_template_kwargs or {}
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="renderer")
        # Templates of requests have a thread of their own: each may take seconds.
        self._templates = TemplateProcess()
        self._template_pool = ThreadPoolExecutor(1, thread_name_prefix="templates")

    async def chat(self, request: ChatCompletionRequest) -> RenderedChat:
        """The prompt of a chat. A chat_template in the request is used: check before.

        Raises:
          RequestError: the messages cannot be rendered.
        """

        def render() -> RenderedChat:
            plan = plan_tools(request)
            return render_chat(
                self.tokenizer,
                request.messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=bool(request.continue_final_message),
                add_special_tokens=bool(request.add_special_tokens),
                tools=plan.template_tools(),
                must_show_tools=not plan.must_call,
                documents=request.documents,
                reasoning_effort=request.reasoning_effort,
                template_kwargs=request.chat_template_kwargs or {},
                default_template_kwargs=self._default_template_kwargs,
                chat_template=request.chat_template,
                render_template=self._templates.render,
                max_model_len=(
                    self._max_model_len if request.truncate_prompt_tokens is None else None
                ),
            )

        pool = self._pool if request.chat_template is None else self._template_pool
        return await asyncio.get_running_loop().run_in_executor(pool, render)

    async def completion(
        self,
        prompt: str | list[str | int | list[int]],
        *,
        add_special_tokens: bool,
        field: str = "prompt",
        is_truncated: bool = False,
    ) -> list[tuple[list[int], str]]:
        """The token ids of each prompt, and its path in the body.

        Args:
          field: what the prompt is called there.
          is_truncated: a text of any length is right, since the caller cuts its tokens.

        Raises:
          RequestError: the prompt mixes text and tokens, or is empty.
        """
        rendered = render_prompts(
            self.tokenizer,
            prompt,
            add_special_tokens=add_special_tokens,
            max_model_len=None if is_truncated else self._max_model_len,
            field=field,
        )
        prompts = []
        # A few at a time: other requests get their turn, and a shutdown need not wait for all.
        while some := await self.in_thread(lambda: list(itertools.islice(rendered, _BATCH))):
            prompts += some
        return prompts

    def close(self) -> None:
        """Ends the threads when they are done."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._template_pool.shutdown(wait=False, cancel_futures=True)
        self._templates.close()

    async def in_thread[T](self, function: Callable[[], T]) -> T:
        """Runs what would hold up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    max_model_len: int | None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    tools: list[dict[str, Any]] | None = None,
    must_show_tools: bool = True,
    documents: list[dict[str, Any]] | None = None,
    reasoning_effort: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    default_template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    render_template: RenderTemplate | None = None,
) -> RenderedChat:
    """Applies the chat template and tokenizes the result.

    max_model_len: a text that is far too long is refused early; None: it is truncated later.
    add_generation_prompt: None is true, unless the last message is continued.
    add_special_tokens: also those that the checkpoint puts around every text, which templates
      mostly write themselves.
    tools: as templates expect them.  must_show_tools: refuse a template that does not read them.
    template_kwargs: more variables for the template.  default_template_kwargs: those of the
      operator.
    chat_template: instead of the model's, rendered by render_template.

    Raises:
      RequestError: the messages cannot be rendered, or an option would have no effect.
    """
    rendered = template_messages(messages)
    continuation = None
    if continue_final_message:
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        continuation = Continuation()
        rendered = continuation.mark(rendered)
    given = _given_variables(template_kwargs or {}, tools, documents, reasoning_effort)
    wanted = {name: param for name, (_, param) in given.items()}
    if not must_show_tools:
        wanted.pop("tools", None)
    variables = tokenizer.template_variables(
        rendered,
        {"tools": None}
        | dict(default_template_kwargs or {})
        | {name: value for name, (value, _) in given.items()},
        add_generation_prompt=continuation is None and add_generation_prompt is not False,
    )
    try:
        if chat_template is not None:
            assert render_template is not None
            text = render_template(chat_template, variables, wanted)
        else:
            template = tokenizer.chat_template_for(has_tools=bool(tools))
            _turn_off_thinking(template.variables, variables, wanted)
            template.check_takes(wanted)
            text = template.render(variables)
    except RequestError:
        raise
    except Exception as error:  # the template is a program, and the client's data runs it
        raise RequestError(
            f"The chat template does not accept these messages: {error!r}"[:300], param="messages"
        ) from error
    if continuation is not None:
        text = continuation.cut(text)
    token_ids = _encode(tokenizer, text, add_special_tokens, max_model_len, "messages")
    return RenderedChat(token_ids, text[-_TAIL_LEN:])


def _given_variables(
    template_kwargs: Mapping[str, Any],
    tools: list[dict[str, Any]] | None,
    documents: list[dict[str, Any]] | None,
    reasoning_effort: str | None,
) -> dict[str, tuple[Any, str]]:
    """The template's variables that the request sets: value, and field of the request."""
    given: dict[str, tuple[Any, str]] = {}
    for name, value in template_kwargs.items():
        param = f"chat_template_kwargs.{name[:100]}"
        if name in _RESERVED_TEMPLATE_KWARGS:
            raise RequestError(f"chat_template_kwargs cannot set {name}.", param=param)
        given[name] = value, param
    if reasoning_effort is not None:
        if reasoning_effort not in _EFFORTS:
            raise RequestError(
                f"reasoning_effort must be one of {', '.join(_EFFORTS)}, got "
                f"{reasoning_effort[:100]!r}.",
                param="reasoning_effort",
            )
        given["reasoning_effort"] = reasoning_effort, "reasoning_effort"
    if documents:
        given["documents"] = documents, "documents"
    if tools:
        given["tools"] = tools, "tools"
    return given


def _turn_off_thinking(known: Set[str], variables: dict[str, Any], wanted: dict[str, str]) -> None:
    """Where a template knows no efforts, "none" is what it calls enable_thinking false."""
    if (
        wanted.get("reasoning_effort") == "reasoning_effort"
        and variables["reasoning_effort"] == "none"
        and "reasoning_effort" not in known
        and "enable_thinking" in known
    ):
        del wanted["reasoning_effort"]
        variables.setdefault("enable_thinking", False)


def render_prompts(
    tokenizer: Tokenizer,
    prompt: str | Sequence[str | int | list[int]],
    *,
    add_special_tokens: bool,
    max_model_len: int | None,
    field: str = "prompt",
) -> Iterator[tuple[list[int], str]]:
    """Token ids of each prompt, and its path: text is tokenized, token ids are taken as they are.

    max_model_len: None takes a text of any length.  field: what the prompt is called.

    Raises:
      RequestError: the prompt mixes text and tokens, or is empty, or a text is far too long.
    """
    if isinstance(prompt, str):
        yield _encode(tokenizer, prompt, add_special_tokens, max_model_len, field), field
        return
    if not prompt:
        raise RequestError(f"{field} must not be empty.", param=field)
    kind = type(prompt[0])
    for i, item in enumerate(prompt):
        if type(item) is not kind:
            raise RequestError(
                f"{field} must be a string, a list of strings, token ids, or a list of lists of "
                "token ids, not a mixture.",
                param=f"{field}[{i}]",
            )
    if kind is int:
        yield [item for item in prompt if isinstance(item, int)], field
        return
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"{field} takes up to {MAX_PROMPTS} prompts, got {len(prompt)}.", param=field
        )
    for i, item in enumerate(prompt):
        path = f"{field}[{i}]"
        if isinstance(item, str):
            item = _encode(tokenizer, item, add_special_tokens, max_model_len, path)
        assert isinstance(item, list)
        yield item, path


def _encode(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, max_model_len: int | None, path: str
) -> list[int]:
    """Tokenizes, but gives up early on a text that is far too long: megabytes take seconds.

    Longer and longer beginnings are tried. One with twice the tokens that fit settles it: the rest
    of the text can change the tokens near the cut, but not halve their number.
    """
    num_chars = _USUAL_CHARS_PER_TOKEN * (max_model_len or 0)
    while max_model_len is not None and num_chars < len(text):
        if len(tokenizer.encode(text[:num_chars], add_special_tokens=False)) > 2 * max_model_len:
            raise RequestError(
                f"The prompt has more than {2 * max_model_len} tokens; this model takes at most "
                f"{max_model_len} tokens, prompt and output together.",
                param=path,
            )
        num_chars *= 2
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)
