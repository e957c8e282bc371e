"""From a chat to its answer, for every route that answers chats.

    prepare_chat: checks, chat template, tokens, grammar      (threads)
    respond_chat: generates, and lets a Format write it       (event loop)

The text of each choice goes through the parser of `make_parser`, if it gives one.
"""

import json
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Send

from jaxserve.errors import RequestError
from jaxserve.grammars import validate_grammar
from jaxserve.grammars.pieces import checked, lark_grammar
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.chat_settings import ChatSettings
from jaxserve.server.choice_parser import ChoiceParser
from jaxserve.server.generation import Format, ServerContext, check_model, respond
from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.protocol.structured_output import StructuredOutputs
from jaxserve.server.reasoning import ReasoningFormat, make_answer_parser
from jaxserve.server.structured_output import grammar_of
from jaxserve.server.tool_choice import ToolPlan, plan_tools
from jaxserve.server.tools import JSON_FORMAT, ToolFormat
from jaxserve.server.tools.strict import text_or_calls_grammar

_MAX_PROBLEM_LEN = 300
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class PreparedChat:
    """A chat that can be generated.

    make_parser: a parser for one choice; None: all its text is content.
    is_parsed: whether there are parsers.  finds_reasoning: whether they look for reasoning.
    is_named_call: tool_choice names the function.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    make_parser: Callable[[], ChoiceParser | None]
    is_parsed: bool
    finds_reasoning: bool
    is_named_call: bool

    def finish_reason(self, reason: str, parser: ChoiceParser | None) -> str:
        """OpenAI's finish_reason of a choice that has ended: tool_calls where the model itself
        chose to call and came to the end, else the engine's reason."""
        has_calls = parser is not None and parser.has_tool_calls
        return "tool_calls" if has_calls and reason == "stop" and not self.is_named_call else reason


async def prepare_chat(context: ServerContext, request: ChatCompletionRequest) -> PreparedChat:
    """Checks all of a request and makes its prompt.

    Raises:
      RequestError: an option is not valid; `param` is its path.
    """
    check_model(context, request.model)
    check_chat_template(context, request)
    try:
        params = request.sampling_params()
    except RequestError as error:
        raise _named_as_given(error, request) from error
    plan = plan_tools(request)
    if plan.mode == "auto":
        _check_auto(context, request)
    prompt = await context.renderer.chat(request)
    answer = _Answer(context, request, plan, prompt.tail)
    if answer.is_constrained:
        grammar = await context.renderer.in_thread(answer.grammar)
        params = msgspec.structs.replace(params, grammar=grammar)
    if answer.needs_special_tokens:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    return PreparedChat(
        prompt_token_ids=context.input_processor.truncate(prompt.token_ids, params),
        params=params,
        make_parser=answer.make_parser,
        is_parsed=answer.is_parsed,
        finds_reasoning=answer.finds_reasoning,
        is_named_call=plan.mode == "named",
    )


def check_chat_template(context: ServerContext, request: ChatCompletionRequest) -> None:
    """Raises RequestError when the request's own template may not be used."""
    trusts = context.config.chat.trust_request_chat_template
    if request.chat_template is not None and not trusts:
        raise RequestError(
            "chat_template is only taken by a server started with --trust-request-chat-template.",
            param="chat_template",
        )


async def respond_chat(
    context: ServerContext,
    request: ChatCompletionRequest,
    prepared: PreparedChat,
    response_format: Format,
    receive: Receive,
    send: Send,
    *,
    arrival_time_s: float,
) -> None:
    """Generates the choices and sends the response, as `respond` does."""
    try:
        await respond(
            context,
            request,
            prepared.params,
            [(prepared.prompt_token_ids, "messages")],
            response_format,
            receive,
            send,
            arrival_time_s=arrival_time_s,
            default_max_tokens=None,
            echo=bool(request.echo),
        )
    except RequestError as error:
        raise _named_as_given(error, request) from error


def _named_as_given(error: RequestError, request: ChatCompletionRequest) -> RequestError:
    """The error, with the names that the client used for max_tokens and logprobs."""
    if error.param == "logprobs":
        name = "top_logprobs"
    elif error.param == "max_tokens" and request.max_completion_tokens is not None:
        name = "max_completion_tokens"
    else:
        return error
    message = error.message.replace(error.param, name, 1)
    return RequestError(message, param=name, status=error.status)


def _check_auto(context: ServerContext, request: ChatCompletionRequest) -> None:
    """Tools that the model may call as it likes need a format to find calls in its text."""
    param = "tools" if request.tool_choice is None else "tool_choice"
    if not context.config.chat.enable_auto_tool_choice:
        raise RequestError(
            "This server was started with --no-enable-auto-tool-choice: tool_choice must be none, "
            "required or a function.",
            param=param,
        )
    if context.chat.tool_format is None:
        raise RequestError(
            "tool_choice auto needs a server that knows how its model writes calls: start it with "
            "--tool-call-parser NAME, or use tool_choice required or a function.",
            param=param,
        )


class _Answer:
    """How the answer to one chat is written and read.

    is_parsed, finds_reasoning: as in PreparedChat.
    is_constrained: there is a grammar, unless response_format asks for nothing.
    """

    def __init__(
        self, context: ServerContext, request: ChatCompletionRequest, plan: ToolPlan, tail: str
    ):
        self._settings = context.chat
        self._tokenizer = context.renderer.tokenizer
        self._vocab_size = context.config.info.vocab_size
        self._request = request
        self._plan = plan
        self._tail = tail
        self._tools = _tool_format(context.chat, plan)
        is_read = self._tools is not None and self._tools.reads_reasoning
        self._reasoning = None if is_read else context.chat.reasoning_format
        self._make_call_id = _mistral_id if context.chat.tool_parser == "mistral" else _call_id
        end = self._reasoning.end if self._reasoning is not None else ""
        self._reasoning_end_id = self._tokenizer.backend.token_to_id(end) if end else None
        self.is_parsed = self._tools is not None or self._reasoning is not None
        self.finds_reasoning = is_read or self._reasoning is not None
        wanted = (request.response_format, request.structured_outputs)
        self.is_constrained = wanted != (None, None) or plan.must_call or bool(plan.strict)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a parser must see special tokens."""
        formats = (self._tools, self._reasoning)
        return any(f is not None and f.needs_special_tokens for f in formats)

    def make_parser(self) -> ChoiceParser | None:
        """A parser for one choice; None when all its text is content."""
        parser = make_answer_parser(self._reasoning, self._tools, self._plan.tools, self._tail)
        if parser is None:
            return None
        tokenizer = self._tokenizer
        return ChoiceParser(
            parser,
            make_call_id=self._make_call_id,
            count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
            max_calls=None if self._plan.is_parallel else 1,
            calls_only=self._plan.must_call,
            reasoning_end_id=self._reasoning_end_id,
        )

    def grammar(self) -> str | None:
        """The grammar of reasoning and answer.

        Raises:
          RequestError: it is not valid; `param` is the field that asks for it.
        """
        request, plan = self._request, self._plan
        grammar = grammar_of(
            request.response_format,
            request.structured_outputs,
            self._tokenizer.special_token_ids,
        )
        is_structured = request.structured_outputs not in (None, StructuredOutputs())
        param = "structured_outputs" if is_structured else "response_format"
        if grammar is not None and plan.must_call:
            raise RequestError(
                f"{param} does not go with a tool_choice whose answer is calls and nothing else.",
                param=param,
            )
        if grammar is not None:
            grammar = self._after_reasoning(grammar, "content", self._settings.reasoning_format)
        if plan.must_call:
            grammar, param = self._calls_grammar(), "tools"
        elif grammar is not None and plan.tools:
            grammar = self._content_or_calls(grammar)
        elif plan.strict:
            grammar, param = self._text_or_calls(), "tools"
        if grammar is None:
            return None
        problem = validate_grammar(grammar, self._tokenizer, self._vocab_size)
        if problem is not None:
            raise RequestError(problem[:_MAX_PROBLEM_LEN], param=param)
        return grammar

    def _content_or_calls(self, content: str) -> str:
        calls = self._calls_grammar()
        return _joined("start: @content | @calls", {"content": content, "calls": calls})

    def _text_or_calls(self) -> str:
        """Any text or valid calls: what strict tools come to when the model decides."""
        plan, tools = self._plan, self._tools
        assert tools is not None
        if tools.reads_reasoning:
            text = lark_grammar("start: /(?s:.*)/")
            text = self._after_reasoning(text, "content", self._settings.reasoning_format)
            return self._content_or_calls(text)
        lark = text_or_calls_grammar(
            tools,
            plan.tools,
            parallel=plan.is_parallel,
            special_tokens=self._tokenizer.special_token_ids,
        )
        grammar = self._checked_calls(lark)
        return self._after_reasoning(grammar, "content", self._reasoning)

    def _calls_grammar(self) -> str:
        plan, tools = self._plan, self._tools
        assert tools is not None
        grammar = self._checked_calls(tools.grammar(plan.tools, parallel=plan.is_parallel))
        return self._after_reasoning(grammar, "calls", self._reasoning)

    def _checked_calls(self, lark: str | None) -> str:
        """The grammar; a RequestError names the tool whose fault it is."""
        plan, tools = self._plan, self._tools
        assert tools is not None
        if lark is None:
            raise RequestError(
                f"The format of this model's calls ({self._settings.tool_parser}) has no grammar "
                "for these tools: use tool_choice required or a function, and no strict.",
                param="tools",
            )
        try:
            return checked(lark_grammar(lark), "tools")
        except RequestError:
            for tool, index in zip(plan.tools, plan.indices, strict=True):
                alone = tools.grammar([tool], parallel=False)
                assert alone is not None
                checked(lark_grammar(alone), f"tools[{index}].function.parameters")
            raise

    def _after_reasoning(self, grammar: str, name: str, reasoning: ReasoningFormat | None) -> str:
        if reasoning is None or reasoning.before_answer is None:
            return grammar
        rules = reasoning.before_answer(self._tail)
        answer = f"{name}-answer"
        return _joined(f"start: before @{answer}\n{rules}", {answer: grammar})


def _tool_format(settings: ChatSettings, plan: ToolPlan) -> ToolFormat | None:
    """The format that the answer's calls have; None: there can be none."""
    tool_format = settings.tool_format
    if not plan.tools:
        return None
    if not plan.must_call:
        return tool_format
    if tool_format is None or tool_format.grammar(plan.tools, parallel=plan.is_parallel) is None:
        return JSON_FORMAT
    return tool_format


def _joined(lark: str, grammars: Mapping[str, str]) -> str:
    """A grammar that starts with `lark`, whose @names are other grammars."""
    joined: list[Any] = [{"lark_grammar": lark}]
    for name, grammar in grammars.items():
        first, *others = json.loads(grammar)["grammars"]
        joined += [first | {"name": name}, *others]
    return json.dumps({"grammars": joined}, ensure_ascii=False)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
