"""Tools in chats: who is called, in which form calls reach clients, and which grammar they have."""

import json
import re
from typing import Any

import pytest

from jaxserve.grammars.pieces import _byte_tokenizer, try_grammar
from tests.fakes_engine import FakeServer, says
from tests.server.chats import HI, TIME, WEATHER, both, call, chat, error, prompt_of, run, streamed

TOOLS = [WEATHER, TIME]
ARGUMENTS = '{"city": "Berlin"}'
BERLIN = call("weather", ARGUMENTS)
LONG: dict[str, Any] = {"messages": HI, "max_tokens": 100}
NAMED = {"type": "function", "function": {"name": "weather"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def is_match(grammar: str | None, text: str) -> bool:
    """Whether a grammar without special tokens takes the whole text."""
    assert grammar is not None
    matcher, problem = try_grammar(grammar, _byte_tokenizer())
    assert problem is None, problem
    return all(matcher.try_consume_tokens([byte]) for byte in text.encode()) and (
        matcher.is_accepting()
    )


def names_of(choice: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in choice["message"].get("tool_calls", ())]


@pytest.mark.parametrize("text", ("", "Let me see.", "é\n\n😀"))
def test_calls_behind_a_text(text: str) -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, tools=TOOLS)
        message = choice["message"]
        assert message["content"] == (text or None)
        first, second = message["tool_calls"]
        assert first["type"] == second["type"] == "function"
        assert first["function"] == {"name": "weather", "arguments": '{"city": "Berlin"}'}
        assert second["function"] == {"name": "time", "arguments": "{}"}
        assert re.fullmatch(r"call_[0-9a-f]{24}", first["id"])
        assert first["id"] != second["id"]
        assert choice["finish_reason"] == "tool_calls"
        assert server.core.requests[-1].grammar is None

    run(test, says(text + BERLIN + "\n" + call("time", "{}")), tool_call_parser="hermes")


def test_no_call() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, tools=TOOLS)
        assert choice["message"] == {"role": "assistant", "content": "Hi <b>", "refusal": None}
        assert choice["finish_reason"] == "stop"

    run(test, says("Hi <b>"), tool_call_parser="hermes")


def test_a_call_that_is_cut_off() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, tools=TOOLS, max_tokens=50)
        (found,) = choice["message"]["tool_calls"]
        assert found["function"]["name"] == "weather"
        assert '{"city": "Berlin"}'.startswith(found["function"]["arguments"])
        assert choice["finish_reason"] == "length"

    run(test, says(BERLIN), tool_call_parser="hermes")


def test_each_choice_has_calls_of_its_own() -> None:
    async def test(server: FakeServer) -> None:
        choices = await both(server, tools=TOOLS, n=3)
        assert [names_of(choice) for choice in choices] == [["weather"]] * 3
        whole = await chat(server, tools=TOOLS, n=3)
        ids = {choice["message"]["tool_calls"][0]["id"] for choice in whole["choices"]}
        assert len(ids) == 3

    run(test, says(BERLIN), tool_call_parser="hermes")


def test_parallel_calls_can_be_forbidden() -> None:
    async def test(server: FakeServer) -> None:
        assert names_of((await both(server, tools=TOOLS))[0]) == ["weather", "time"]
        (choice,) = await both(server, tools=TOOLS, parallel_tool_calls=False)
        assert names_of(choice) == ["weather"]
        for parallel in (True, False):
            await chat(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
            grammar = server.core.requests[-1].grammar
            assert is_match(grammar, f"{BERLIN}\n{BERLIN}") == parallel

    run(test, says(BERLIN + "\n" + call("time", "{}")), tool_call_parser="hermes")


@pytest.mark.parametrize("parser", ("hermes", "auto"))
@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    (
        ("required", ["weather", "time"], []),
        (NAMED, ["weather"], ["time"]),
        (allowed("required", "time"), ["time"], ["weather"]),
    ),
)
def test_calls_that_must_be(choice: Any, good: list[str], bad: list[str], parser: str) -> None:
    """With "auto" nobody knows the model's format (the template has none): a JSON list is asked
    for instead."""

    def written(name: str, arguments: str) -> str:
        if parser == "hermes":
            return call(name, arguments)
        return f'[{{"name": "{name}", "parameters": {arguments}}}]'

    async def test(server: FakeServer) -> None:
        (answer,) = await both(server, tools=TOOLS, tool_choice=choice)
        assert names_of(answer) == good[:1]
        assert answer["message"]["content"] is None
        is_named = choice is NAMED
        assert answer["finish_reason"] == ("stop" if is_named else "tool_calls")
        grammar = server.core.requests[-1].grammar
        assert is_match(grammar, written(good[0], arguments))
        assert not is_match(grammar, "Hello")
        assert not is_match(grammar, written("nobody", "{}"))
        for name in bad:
            assert not is_match(grammar, written(name, '{"city": "x"}'))
        if parser == "hermes":
            twice = "\n".join([written(good[0], arguments)] * 2)
            assert is_match(grammar, twice) == (not is_named)
        if "weather" in good:
            assert not is_match(grammar, written("weather", "{}"))
            assert not is_match(grammar, written("weather", '{"city": 1}'))

    arguments = '{"city": "x"}' if good[0] == "weather" else "{}"
    run(test, says(written(good[0], arguments)), tool_call_parser=parser)


def test_a_schema_that_cannot_be_is_named() -> None:
    bad = {"name": "bad", "parameters": {"type": "object", "properties": {"x": {"type": "no"}}}}
    tools = [WEATHER, {"type": "function", "function": bad}]

    async def test(server: FakeServer) -> None:
        found = await error(server, tools=tools, tool_choice="required")
        assert found["param"] == "tools[1].function.parameters"
        strict = {"type": "function", "function": bad | {"strict": True}}
        found = await error(server, tools=[WEATHER, strict])
        assert found["param"] == "tools[1].function.parameters"

    run(test, tool_call_parser="hermes")


def test_strict_tools_cannot_be_called_wrongly() -> None:
    async def test(server: FakeServer) -> None:
        strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
        assert names_of((await both(server, tools=[strict, TIME]))[0]) == ["weather"]
        grammar = server.core.requests[-1].grammar
        for text in ("", "Hello", BERLIN, f"I see.\n{BERLIN}", f"{BERLIN}\n{call('time', '{}')}"):
            assert is_match(grammar, text), text
        for text in (call("weather", "{}"), f"Hm {call('weather', '[]')}", call("x", "{}")):
            assert not is_match(grammar, text), text

    run(test, says(BERLIN), tool_call_parser="hermes")


def test_an_answer_in_json_or_calls() -> None:
    async def test(server: FakeServer) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        assert names_of((await both(server, tools=TOOLS, response_format=wanted))[0]) == ["weather"]
        grammar = server.core.requests[-1].grammar
        assert is_match(grammar, '{"a": 1}') and is_match(grammar, BERLIN)
        assert not is_match(grammar, '{"a": "1"}')
        assert not is_match(grammar, "Hello") and not is_match(grammar, call("weather", "{}"))

    run(test, says(BERLIN), tool_call_parser="hermes")


@pytest.mark.parametrize("choice", ("required", NAMED, allowed("required", "time")))
def test_an_answer_that_must_be_calls_has_no_content_to_ask_for(choice: Any) -> None:
    schema = {"name": "x", "schema": {"type": "object"}}
    asked = (
        ("structured_outputs", {"regex": "a+"}),
        ("structured_outputs", {"json": {"type": "object"}}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": schema}),
    )

    async def test(server: FakeServer) -> None:
        tools = {"tools": TOOLS, "tool_choice": choice}
        for name, wanted in asked:
            found = await error(server, **tools, **{name: wanted})
            assert found["param"] == name
            assert "tool_choice" in found["message"]
        wanted = {"type": "json_object"}
        found = await error(server, **tools, response_format=wanted, structured_outputs={})
        assert found["param"] == "response_format"
        both_ask = {"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}
        assert (await error(server, **tools, **both_ask))["param"] == "structured_outputs"
        options = {
            "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
        }
        form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        response = await server.post("/v1/messages", **LONG, **options, output_config=form)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("output_config.format does not go")
        await chat(server, **tools, response_format={"type": "text"})

    run(test, says(BERLIN), tool_call_parser="hermes")


def test_calls_that_must_be_are_never_content_however_they_are_cut_off() -> None:
    def one(name: str, arguments: str) -> str:
        return f'{{"name": "{name}", "parameters": {arguments}}}'

    texts = {
        "auto": f"[{one('weather', ARGUMENTS)}, {one('time', '{}')}]",
        "hermes": f"{BERLIN}\n{call('time', '{}')}",
    }

    async def test(server: FakeServer, text: str) -> None:
        seen: set[tuple[str, ...]] = set()
        for length in range(1, len(text), 3):
            (choice,) = await both(server, tools=TOOLS, tool_choice="required", max_tokens=length)
            assert not choice["message"]["content"], length
            assert choice["finish_reason"] == "length"
            calls = choice["message"].get("tool_calls", ())
            for found, arguments in zip(calls, (ARGUMENTS, "{}"), strict=False):
                assert arguments.startswith(found["function"]["arguments"])
            seen.add(tuple(names_of(choice)))
        assert seen == {(), ("weather",), ("weather", "time")}

    for parser, text in texts.items():
        run(lambda server, text=text: test(server, text), says(text), tool_call_parser=parser)


@pytest.mark.parametrize("max_tokens", (5, 60))
@pytest.mark.parametrize("stream", (False, True))
def test_other_routes_show_no_call_that_is_cut_off_either(max_tokens: int, stream: bool) -> None:
    text = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}, {{"name": "time"'
    num_calls = int(max_tokens > 5)

    async def test(server: FakeServer) -> None:
        options: dict[str, Any] = {"stream": stream}
        tool = {"name": "weather", "input_schema": {"type": "object"}}
        response = await server.post(
            "/v1/messages",
            **LONG | {"max_tokens": max_tokens},
            **options,
            tools=[tool],
            tool_choice={"type": "any"},
        )
        assert response.status_code == 200
        assert response.text.count('"type":"tool_use"') == num_calls
        assert '"type":"text"' not in response.text
        assert '"stop_reason":"max_tokens"' in response.text
        response = await server.post(
            "/v1/responses",
            **options,
            input="hi",
            max_output_tokens=max_tokens,
            tools=[{"type": "function", "name": "weather"}],
            tool_choice="required",
        )
        assert response.status_code == 200
        assert ('"type":"function_call"' in response.text) == bool(num_calls)
        assert '{\\"na' not in response.text
        assert '"incomplete_details":{"reason":"max_output_tokens"}' in response.text

    run(test, says(text), tool_call_parser="auto")


def test_with_auto_what_is_no_whole_call_stays_content() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, tools=TOOLS, max_tokens=20)
        assert choice["message"]["content"] == BERLIN[:20]
        assert choice["finish_reason"] == "length"

    run(test, says(BERLIN), tool_call_parser="hermes")


@pytest.mark.parametrize(
    ("options", "names"),
    (
        ({"tools": TOOLS}, ["weather", "time"]),
        ({"tools": TOOLS, "tool_choice": "auto"}, ["weather", "time"]),
        ({"tools": TOOLS, "tool_choice": "required"}, ["weather", "time"]),
        ({"tools": TOOLS, "tool_choice": NAMED}, ["weather"]),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "time")}, ["time"]),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
        ({"tools": [], "tool_choice": "none", "parallel_tool_calls": True}, None),
    ),
)
def test_the_template_gets_the_tools_that_may_be_called(
    options: dict[str, Any], names: list[str] | None
) -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, **options)
        if names is None:
            assert "<tools>" not in prompt_of(server)
            assert choice["message"]["content"] == BERLIN, "nothing is a call"
            return
        shown = json.loads(prompt_of(server).partition("<tools>")[2].partition("</tools>")[0])
        assert [tool["function"]["name"] for tool in shown] == names
        if "weather" in names:
            assert shown[0] == WEATHER
        if "time" in names:
            parameters = {"type": "object", "properties": {}}
            function = {"name": "time", "parameters": parameters}
            assert shown[-1] == {"type": "function", "function": function}

    run(test, says(BERLIN), tool_call_parser="hermes")


@pytest.mark.parametrize(
    ("options", "param", "text"),
    (
        ({"tool_choice": "required"}, "tool_choice", "only allowed with tools"),
        ({"tool_choice": NAMED}, "tool_choice", "only allowed with tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type", "custom"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function"}},
            "tool_choice.function",
            "missing",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}},
            "tool_choice.function.name",
            "no tool 'x'",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed("never", "time")},
            "tool_choice.allowed_tools.mode",
            "auto or required",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto")},
            "tool_choice.allowed_tools.tools",
            "empty",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto", "x")},
            "tool_choice.allowed_tools.tools[0].function.name",
            "no tool",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "functions"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name", "missing"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name", "characters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
            "must be object",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": ["array", "null"]}}}]},
            "tools[0].function.parameters.type",
            "must be object",
        ),
        ({"tools": [TIME, TIME]}, "tools[1].function.name", "another tool"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "", "Expected 'object"),
        ({"tools": [TIME] * 1025}, "tools", "up to 1024"),
    ),
)
def test_bad_tools(options: dict[str, Any], param: str, text: str) -> None:
    async def test(server: FakeServer) -> None:
        found = await error(server, **options)
        assert found["param"] == (param or "tools[0].function.parameters")
        assert text in found["message"]

    run(test, tool_call_parser="hermes")


def test_calls_that_must_be_need_no_template_that_shows_tools() -> None:
    async def test(server: FakeServer) -> None:
        await chat(server, tools=TOOLS, tool_choice="required")
        assert (await error(server, tools=TOOLS))["param"] == "tools"

    options: dict[str, Any] = {
        "chat_template": "{{ messages[0].content }}",
        "tool_call_parser": "hermes",
    }
    run(test, says(BERLIN), **options)


def test_auto_needs_a_format() -> None:
    async def test(server: FakeServer) -> None:
        found = await error(server, tools=TOOLS)
        assert found["param"] == "tools"
        assert "--tool-call-parser" in found["message"]
        found = await error(server, tools=TOOLS, tool_choice="auto")
        assert found["param"] == "tool_choice"

    run(test)


def test_auto_can_be_turned_off() -> None:
    async def test(server: FakeServer) -> None:
        found = await error(server, tools=TOOLS)
        assert "--no-enable-auto-tool-choice" in found["message"]
        await chat(server, tools=TOOLS, tool_choice="required")
        await chat(server, tools=TOOLS, tool_choice="none")

    run(test, says(BERLIN), tool_call_parser="hermes", enable_auto_tool_choice=False)


def test_the_format_is_told_from_the_template() -> None:
    template = "{{ tools }}<tool_call></tool_call>{{ messages[0].content }}"

    async def test(server: FakeServer) -> None:
        assert names_of((await both(server, tools=TOOLS))[0]) == ["weather"]

    run(test, says(BERLIN), chat_template=template)


def test_ids_that_mistral_takes() -> None:
    text = '[TOOL_CALLS][{"name": "time", "arguments": {}}]'

    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, tools=TOOLS)
        (found,) = choice["message"]["tool_calls"]
        assert re.fullmatch(r"[0-9a-zA-Z]{9}", found["id"])

    run(test, says(text), tool_call_parser="mistral")


def test_calls_come_while_they_are_written() -> None:
    async def test(server: FakeServer) -> None:
        answer = await streamed(server, tools=TOOLS)
        pieces = [
            piece["function"]["arguments"]
            for chunk in answer["chunks"]
            for piece in chunk["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert "".join(pieces) == '{"city": "Berlin"}'
        assert len(pieces) > 10

    run(test, says(BERLIN), tool_call_parser="hermes")


def test_logprobs_beside_calls() -> None:
    async def test(server: FakeServer) -> None:
        (choice,) = await both(server, tools=TOOLS, logprobs=True, return_token_ids=True)
        assert len(choice["logprobs"]["content"]) == len(BERLIN) + 1
        assert len(choice["token_ids"]) == len(BERLIN) + 1

    run(test, says(BERLIN), tool_call_parser="hermes")
