"""Malformed requests get a 4xx that names the field; no body whatever gives a 500."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from jaxserve.errors import RequestError
from jaxserve.server.protocol.anthropic import decode_messages_request
from jaxserve.server.protocol.chat import UNSUPPORTED_IN_CHAT, decode_chat_request
from jaxserve.server.protocol.completions import (
    UNSUPPORTED_IN_COMPLETIONS,
    decode_completion_request,
)
from jaxserve.server.protocol.decoding import BodyDecoder
from jaxserve.server.protocol.responses import decode_responses_request
from tests.fakes_engine import MODEL, VOCAB_SIZE, FakeServer, echoes, fake_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": HI} | fields).encode()


def completion(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi"} | fields).encode()


def messages(*contents: object) -> bytes:
    """A chat in which each item is a whole message."""
    return chat(messages=list(contents))


def without(body: bytes, name: str) -> bytes:
    fields = json.loads(body)
    del fields[name]
    return json.dumps(fields).encode()


def post(path: str, body: bytes, **config: Any) -> httpx.Response:
    """One request to a server of its own; exceptions of the app are raised here."""

    async def main() -> httpx.Response:
        async with fake_server(echoes, **config) as server:
            response = await server.client.post(path, content=body)
            assert server.core.requests == [] or response.status_code == 200
            return response

    return asyncio.run(main())


def part(kind: str, **fields: object) -> dict:
    return {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind} | fields]}


DEEP = b"[" * 100_000
# path, body, status, param, what the message says
BAD = (
    # The body as a whole.
    (CHAT, b"", 400, None, "not JSON"),
    (CHAT, b"{", 400, None, "not JSON"),
    (CHAT, chat() + b"x", 400, None, "not JSON"),
    (CHAT, b"[]", 400, None, "Expected 'object'"),
    (CHAT, b"null", 400, None, "Expected 'object'"),
    (CHAT, chat().replace(b"hi", b"h\xff"), 400, None, "UTF-8"),
    (CHAT, chat().replace(b"hi", b"\\ud800"), 400, None, "not JSON"),
    (CHAT, chat().replace(b"hi", b"h\x00i"), 400, None, "not JSON"),
    (CHAT, b'{"model": "tiny", "messages": ' + DEEP, 400, "messages[0]", "Expected 'object'"),
    (CHAT, b'{"model": "tiny", "x": ' + DEEP, 400, None, "nested too deeply"),
    (CHAT, b'{"model": "tiny", "vllm_xargs": ' + DEEP, 400, None, "nested too deeply"),
    (CHAT, chat().replace(b'"hi"', b"NaN"), 400, None, "not JSON"),
    # Fields that are missing, of the wrong type or empty.
    (CHAT, without(chat(), "model"), 400, "model", "missing"),
    (CHAT, chat(model=7), 400, "model", "Expected 'str'"),
    (CHAT, chat(model="gpt-9"), 404, "model", "does not exist"),
    (COMPLETIONS, completion(model="gpt-9"), 404, "model", "does not exist"),
    (CHAT, without(chat(), "messages"), 400, "messages", "missing"),
    (CHAT, chat(messages=[]), 400, "messages", "empty"),
    (CHAT, chat(messages="hi"), 400, "messages", "Expected 'array'"),
    (CHAT, messages({"content": "x"}), 400, "messages[0].role", "missing"),
    (CHAT, messages(*HI, {"role": "user"}), 400, "messages[1].content", "string"),
    (CHAT, messages({"role": "user", "content": 5}), 400, "messages[0].content", "Expected"),
    (CHAT, messages({"role": "user", "content": []}), 400, "messages[0].content", "string"),
    (CHAT, messages({"role": "", "content": "x"}), 400, "messages[0].role", "a name"),
    (CHAT, messages({"role": "x" * 99, "content": "x"}), 400, "messages[0].role", "a name"),
    (CHAT, messages({"role": "developer", "content": "x"}), 400, "messages", "no developers"),
    (CHAT, messages(part("image_url", image_url={})), 400, "messages[0].content[1].type", "text"),
    (CHAT, messages(part("text")), 400, "messages[0].content[1].text", "missing"),
    (CHAT, messages({"role": "tool"}), 400, "messages[0].content", "string"),
    (
        CHAT,
        messages({"role": "assistant", "content": "x", "tool_calls": [{}]}),
        400,
        "messages[0].tool_calls[0].function",
        "missing",
    ),
    (CHAT, chat(chat_template_kwargs={"tools": 1}), 400, "chat_template_kwargs.tools", "cannot"),
    (CHAT, chat(chat_template_kwargs=[1]), 400, "chat_template_kwargs", "Expected 'object"),
    (COMPLETIONS, without(completion(), "prompt"), 400, "prompt", "missing"),
    (COMPLETIONS, completion(prompt=""), 400, "prompt", "no tokens"),
    (COMPLETIONS, completion(prompt=[]), 400, "prompt", "empty"),
    (COMPLETIONS, completion(prompt=["a", ""]), 400, "prompt[1]", "no tokens"),
    (COMPLETIONS, completion(prompt=[[1], []]), 400, "prompt[1]", "no tokens"),
    (COMPLETIONS, completion(prompt=["a", 1]), 400, "prompt[1]", "mixture"),
    (COMPLETIONS, completion(prompt=[[1, "a"]]), 400, "prompt[0][1]", "Expected 'int'"),
    (COMPLETIONS, completion(prompt=[1, 2.5]), 400, "prompt[1]", "Expected"),
    (COMPLETIONS, completion(prompt=[1, VOCAB_SIZE]), 400, "prompt[1]", "vocabulary"),
    (COMPLETIONS, completion(prompt=[[1], [2, -1]]), 400, "prompt[1][1]", "vocabulary"),
    (COMPLETIONS, completion(prompt=[2**70]), 400, "prompt[0]", "vocabulary"),
    (COMPLETIONS, completion(prompt=[10**4000]), 400, "prompt[0]", "number too large"),
    (COMPLETIONS, completion(prompt="x", seed=10**4000), 400, "seed", "number too large"),
    (COMPLETIONS, b'{"model":"tiny","prompt":[1' + b"0" * 9999 + b"]}", 400, "prompt[0]", "range"),
    (COMPLETIONS, completion(prompt=["a"] * 2049), 400, "prompt", "up to 2048"),
    (COMPLETIONS, completion(prompt=["a"] * 17, n=128), 400, "n", "2048 choices"),
    # Values out of range.
    (CHAT, chat(n=0), 400, "n", "between 1 and 128"),
    (CHAT, chat(n=129), 400, "n", "between 1 and 128"),
    (CHAT, chat(n=1.5), 400, "n", "Expected 'int"),
    (CHAT, chat(temperature=-1), 400, "temperature", "between 0"),
    (CHAT, chat(temperature="hot"), 400, "temperature", "Expected 'float"),
    (CHAT, chat(temperature=True), 400, "temperature", "Expected 'float"),
    (CHAT, chat().replace(b"{", b'{"temperature": NaN, ', 1), 400, None, "not JSON"),
    (CHAT, chat().replace(b"{", b'{"temperature": 1e999, ', 1), 400, "temperature", "range"),
    (CHAT, chat(top_p=1.1), 400, "top_p", "between 0"),
    (CHAT, chat(top_k=-2), 400, "top_k", "at least -1"),
    (CHAT, chat(top_k=10**12), 400, "top_k", "at most 2147483647, got 1000000000000"),
    (CHAT, chat(min_p=2), 400, "min_p", "between 0"),
    (CHAT, chat(seed=2**64), 400, "seed", "between"),
    (CHAT, chat(seed="x"), 400, "seed", "Expected 'int"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "at least 1"),
    (CHAT, chat(max_tokens=10**30), 400, "max_tokens", "at most 2147483647, got a number too"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens", "at least 1"),
    (CHAT, chat(max_completion_tokens=400), 400, "max_completion_tokens", "200 tokens"),
    (CHAT, chat(max_completion_tokens=4, max_tokens=5), 400, "max_completion_tokens", "differ"),
    (CHAT, chat(min_tokens=-1), 400, "min_tokens", "at least 0"),
    (CHAT, chat(min_tokens=9, max_tokens=8), 400, "min_tokens", "larger than max_tokens"),
    (CHAT, chat(stop=""), 400, "stop", "empty"),
    (CHAT, chat(stop=["a", ""]), 400, "stop[1]", "empty"),
    (CHAT, chat(stop=["a"] * 17), 400, "stop", "up to 16"),
    (CHAT, chat(stop=[1]), 400, "stop[0]", "Expected 'str'"),
    (CHAT, chat(stop="x" * 1025), 400, "stop", "at most 1024"),
    (CHAT, chat(stop_token_ids=[VOCAB_SIZE]), 400, "stop_token_ids[0]", "vocabulary"),
    (CHAT, chat(stop_token_ids=list(range(32))), 400, "stop_token_ids", "up to 31"),
    (CHAT, chat(stream="yes"), 400, "stream", "Expected 'bool"),
    (CHAT, chat(stream_options={}), 400, "stream_options", "only allowed with stream"),
    (COMPLETIONS, completion(presence_penalty=2.5), 400, "presence_penalty", "between -2"),
    (COMPLETIONS, completion(frequency_penalty=-3), 400, "frequency_penalty", "between -2"),
    (COMPLETIONS, completion(repetition_penalty=0), 400, "repetition_penalty", "above 0"),
    (COMPLETIONS, completion(logit_bias={"5": 101}), 400, "logit_bias.5", "between -100"),
    (COMPLETIONS, completion(logit_bias={"x": 1}), 400, "logit_bias", "Expected 'int'"),
    (COMPLETIONS, completion(logit_bias={"-1": 1}), 400, "logit_bias", "out of range"),
    (COMPLETIONS, completion(logit_bias={str(VOCAB_SIZE): 1}), 400, "logit_bias.300", "vocabulary"),
    (COMPLETIONS, completion(allowed_token_ids=[]), 400, "allowed_token_ids", "empty"),
    (COMPLETIONS, completion(allowed_token_ids=[1, 300]), 400, "allowed_token_ids[1]", "vocabul"),
    (COMPLETIONS, completion(bad_words=["ok", ""]), 400, "bad_words[1]", "empty"),
    (COMPLETIONS, completion(bad_words=[" "]), 400, "bad_words[0]", "only spaces"),
    (COMPLETIONS, completion(bad_words=["x" * 9]), 400, "bad_words[0]", "at most 8"),
    (COMPLETIONS, completion(logits_processors=["no"]), 400, "logits_processors[0]", "not instal"),
    (
        COMPLETIONS,
        completion(logits_processors=[{"qualname": "x", "kwargs": {"a": 1}}]),
        400,
        "logits_processors[0].kwargs",
        "not supported",
    ),
    (
        COMPLETIONS,
        completion(logits_processors=[{"qualname": "x", "args": [1] * 5}]),
        400,
        "logits_processors[0]",
        "up to 4",
    ),
    (
        CHAT,
        chat(logprobs=True, top_logprobs=21),
        400,
        "top_logprobs",
        "top_logprobs can be at most",
    ),
    (COMPLETIONS, completion(logprobs=-2), 400, "logprobs", "at least -1"),
    (COMPLETIONS, completion(logprobs=21), 400, "logprobs", "at most 20"),
    (COMPLETIONS, completion(logprobs=-1), 400, "logprobs", "at most 20"),
    (COMPLETIONS, completion(logprobs=True), 400, "logprobs", "Expected 'int"),
    (COMPLETIONS, completion(logprobs=-1, echo=True), 400, "logprobs", "without echo"),
    (COMPLETIONS, completion(logprob_token_ids=[300]), 400, "logprob_token_ids[0]", "vocabulary"),
    (COMPLETIONS, completion(logprob_token_ids=[1] * 129), 400, "logprob_token_ids", "up to 128"),
    (COMPLETIONS, completion(prompt_logprobs=-1), 400, "prompt_logprobs", "at least 0"),
    (COMPLETIONS, completion(prompt_logprobs=21), 400, "prompt_logprobs", "at most 20"),
    (COMPLETIONS, completion(prompt_logprobs=0, stream=True), 400, "prompt_logprobs", "a stream"),
    (COMPLETIONS, completion(max_tokens=0), 400, "max_tokens", "at least 1"),
    (COMPLETIONS, completion(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", "-1 or at"),
    (COMPLETIONS, completion(truncate_prompt_tokens=-2), 400, "truncate_prompt_tokens", "least -1"),
    (COMPLETIONS, completion(truncation_side="top"), 400, "truncation_side", "Invalid enum"),
    (CHAT, chat(priority=1), 400, "priority", "--scheduling-policy priority"),
    (CHAT, chat(priority=2**31), 400, "priority", "32 bits"),
    (CHAT, chat(cache_salt=""), 400, "cache_salt", "empty"),
    (CHAT, chat(request_id="a\nb"), 400, "request_id", "ASCII"),
    # Too long.
    (COMPLETIONS, completion(prompt=[1] * 200), 400, "prompt", "at most 200 tokens"),
    (COMPLETIONS, completion(prompt=[1] * 150, max_tokens=51), 400, "max_tokens", "at most 50"),
    (CHAT, messages({"role": "user", "content": "x" * 300}), 400, "messages", "200 tokens"),
)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "text"), BAD, ids=[str(i) for i in range(len(BAD))]
)
def test_bad_requests(path: str, body: bytes, status: int, param: str | None, text: str) -> None:
    response = post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert text in error["message"]
    assert len(error["message"]) < 300
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert error["type"] == kind
    assert isinstance(error["code"], str)


# A value that asks for something, for every option that is known and not implemented.
ASKING: dict[str, Any] = {
    "add_generation_prompt": False,
    "audio": {"voice": "x"},
    "best_of": 2,
    "chat_template": "{{ x }}",
    "continue_final_message": True,
    "detokenize": False,
    "documents": [{"x": "y"}],
    "early_stopping": True,
    "ebnf": "root ::= x",
    "echo": True,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "json_schema": "{}",
    "length_penalty": 2,
    "chat_template_kwargs": {"x": 1},
    "logprob_token_ids": [1],
    "modalities": ["text", "audio"],
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_token_offsets": True,
    "stream_interval": 2,
    "structured_outputs": {"regex": "x"},
    "repeat_penalty": 2,
    "suffix": "x",
    "tfs_z": 2,
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "top_logprobs": 2,
    "typical_p": 0.5,
    "use_beam_search": True,
    "watermarking": True,
}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    (
        (CHAT, chat, sorted(UNSUPPORTED_IN_CHAT)),
        (COMPLETIONS, completion, sorted(UNSUPPORTED_IN_COMPLETIONS)),
    ),
    ids=("chat", "completions"),
)
def test_what_is_not_implemented_is_refused_by_name(path: str, body: Any, names: list) -> None:
    async def main() -> None:
        async with fake_server() as server:
            for name in names:
                value = ASKING.get(name, 1 if name != "logprobs" else True)
                response = await server.client.post(path, content=body(**{name: value}))
                assert response.status_code == 400, (name, response.text)
                error = response.json()["error"]
                assert error["param"] == name
                assert "not supported" in error["message"]
            assert server.core.requests == []

    asyncio.run(main())


GENERATING = (
    decode_chat_request,
    decode_completion_request,
    decode_messages_request,
    decode_responses_request,
)
# Fields that change no answer of the routes that have them.
LABELS = {"cache_control", "metadata", "prompt_cache_key", "safety_identifier"}


@pytest.mark.parametrize("decoder", GENERATING, ids=lambda decoder: decoder.kind.__name__)
def test_what_another_route_has_is_never_ignored(decoder: BodyDecoder) -> None:
    known = {*decoder.kind.__struct_fields__, *decoder.unsupported}
    for other in GENERATING:
        assert set(other.kind.__struct_fields__) - known - LABELS == set(), other.kind.__name__


# What llama.cpp, SGLang, Transformers and Mistral call what changes an answer.
FOREIGN = (
    "custom_logit_processor enable_thinking grammar max_new_tokens mirostat n_predict random_seed "
    "repeat_penalty stop_regex typical_p"
)


@pytest.mark.parametrize(("path", "body"), ((CHAT, chat), (COMPLETIONS, completion)))
def test_what_other_servers_have_is_refused_by_name(path: str, body: Any) -> None:
    for name in FOREIGN.split():
        response = post(path, body(**{name: 7}))
        assert response.status_code == 400, name
        assert response.json()["error"]["param"] == name


def test_a_hint_never_names_what_the_route_refuses_too() -> None:
    """/v1/messages has no structured_outputs, /v1/responses no max_tokens."""
    for decoder, name in (
        (decode_messages_request, "guided_json"),
        (decode_responses_request, "max_new_tokens"),
    ):
        body = {"model": MODEL, "messages": [], "input": "x", "max_tokens": 1}
        body = {k: v for k, v in body.items() if k not in decoder.unsupported} | {name: 1}
        with pytest.raises(RequestError, match=f"^{name} is not supported.*Leave it out"):
            decoder(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("name", "field"),
    (
        ("stop_sequences", "stop"),
        ("guided_json", "structured_outputs.json"),
        ("guided_regex", "structured_outputs.regex"),
        ("ebnf", "structured_outputs.grammar"),
    ),
)
def test_what_has_another_name_is_told_it(name: str, field: str) -> None:
    error = post(COMPLETIONS, completion(**{name: "x"})).json()["error"]
    assert error["param"] == name
    assert f"Use {field}." in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    (
        ("GET", CHAT, 405),
        ("PUT", COMPLETIONS, 405),
        ("POST", "/health", 405),
        ("GET", "/reset_prefix_cache", 405),
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/rerank", 404),
        ("GET", "/v1/models/nobody", 404),
    ),
)
def test_wrong_routes(method: str, path: str, status: int) -> None:
    async def main() -> None:
        async with fake_server() as server:
            response = await server.client.request(method, path)
            assert response.status_code == status
            error = response.json()["error"]
            assert error["message"] and error["code"]
            if status == 405:
                assert response.headers["allow"]

    asyncio.run(main())


async def _post_in_chunks(server: FakeServer, chunks: list[bytes], headers: dict) -> tuple:
    """A request that the app reads chunk by chunk; returns the status and the chunks left."""
    left = list(chunks)
    sent: list[Any] = []

    async def receive() -> dict:
        if not left:
            await asyncio.Event().wait()
        body = left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "query_string": b"",
    }
    await asyncio.wait_for(server.app(scope, receive, send), 5)
    return sent[0]["status"], len(left)


def test_a_body_over_the_limit_is_413_before_it_is_read() -> None:
    async def main() -> None:
        async with fake_server(max_body_bytes=1024) as server:
            chunks = [b" " * 400] * 10
            assert await _post_in_chunks(server, chunks, {}) == (413, 7)
            headers = {"content-length": "4000"}
            assert await _post_in_chunks(server, chunks, headers) == (413, 10)
            body = completion()
            exact = [b" " * (1024 - len(body)), body]
            assert await _post_in_chunks(server, exact, {}) == (200, 0)
            assert await _post_in_chunks(server, [b" ", *exact], {}) == (413, 0)
            response = await server.client.post(COMPLETIONS, content=b"x" * 2000)
            assert response.status_code == 413
            assert "1024 bytes" in response.json()["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize("path", (CHAT, COMPLETIONS))
@pytest.mark.parametrize("text", ("x" * 300_000, " " * 300_000, " the" * 100_000))
def test_a_text_that_is_far_too_long_is_not_tokenized_whole(path: str, text: str) -> None:
    async def main() -> None:
        async with fake_server() as server:
            tokenizer = server.context.renderer.tokenizer
            lengths = []
            encode = tokenizer.encode

            def spying_encode(text: str, *, add_special_tokens: bool) -> list[int]:
                lengths.append(len(text))
                return encode(text, add_special_tokens=add_special_tokens)

            tokenizer.encode = spying_encode
            body = chat if path == CHAT else completion
            field = {"messages": [{"role": "user", "content": text}]}
            data = body(**field) if path == CHAT else body(prompt=["a", text])
            response = await server.client.post(path, content=data)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == ("messages" if path == CHAT else "prompt[1]")
            assert "more than 400 tokens" in error["message"]
            assert max(lengths) < 10_000

    asyncio.run(main())


def test_a_bug_is_a_500_with_an_error_body() -> None:
    async def main() -> None:
        async with fake_server() as server:
            server.context.renderer.chat = None  # pyright: ignore[reportAttributeAccessIssue]
            transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                response = await client.post(CHAT, content=chat())
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "internal_server_error"

    asyncio.run(main())


# --- fuzz ----------------------------------------------------------------------------------------

RICH_CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "héllo 😀"}], "name": "Ann"},
        {"role": "assistant", "content": "ok", "reasoning_content": "hm"},
    ],
    "n": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "max_completion_tokens": 6,
    "min_tokens": 1,
    "stop": ["x", "yz"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"shout": True},
    "cache_salt": "s",
    "request_id": "r1",
    "tools": [],
    "response_format": {"type": "text"},
    "logit_bias": {},
}
RICH_COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "prompt": [[1, 2, 3], [4]],
    "n": 1,
    "max_tokens": 4,
    "stop": "q",
    "seed": -5,
    "stream": False,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "user": "u",
    "echo": True,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "logprob_token_ids": [3],
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [1, 2, 3],
    "bad_words": ["ab"],
    "truncate_prompt_tokens": 2,
    "truncation_side": "right",
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "structured_outputs": {"choice": ["a", "b"]},
    "stream_options": None,
}
STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**64),
    10**40,
    0.5,
    -0.0,
    1e308,
    "",
    "x",
    "\x00",
    '\u2028 \\ " 😀',
    "<|im_end|>",
    [],
    [[]],
    [None],
    [1, "a"],
    {},
    {"a": {"b": [1]}},
    {"type": "text"},
)


def _mutate(rng: random.Random, value: Any) -> Any:
    """The same JSON with one place changed, somewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        action = rng.random()
        if action < 0.1:
            return {k: v for k, v in value.items() if k != name}
        if action < 0.2:
            return value | {rng.choice(("x", "tools", "role", "n", "stop")): rng.choice(STRANGE)}
        return value | {name: _mutate(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], _mutate(rng, value[i]), *value[i + 1 :]]
    return rng.choice(STRANGE)


def _mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """The same bytes with a few changed, dropped or doubled."""
    mutable = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(mutable))
        action = rng.random()
        if action < 0.5:
            mutable[i] = rng.choice(b'"{}[]:,\\0e-\x00\xff\xed\xa0u ')
        elif action < 0.75:
            del mutable[i : i + rng.randint(1, 4)]
        else:
            mutable[i:i] = mutable[i : i + rng.randint(1, 8)]
    return bytes(mutable)


def test_no_body_gives_a_500() -> None:
    """400 mutated bodies, seeds printed on failure; the server still works afterwards."""

    async def main() -> None:
        num_by_status: dict[int, int] = {}
        async with fake_server() as server:
            for seed in range(400):
                rng = random.Random(seed)
                path, body = rng.choice(((CHAT, RICH_CHAT), (COMPLETIONS, RICH_COMPLETION)))
                value = body
                for _ in range(rng.choice((0, 1, 1, 2, 4))):
                    value = _mutate(rng, value)
                data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
                if rng.random() < 0.3:
                    data = _mutate_bytes(rng, data)
                response = await asyncio.wait_for(server.client.post(path, content=data), 10)
                status = response.status_code
                assert status in (200, 400, 404), (seed, data, response.text)
                if status != 200:
                    assert response.json()["error"]["message"], (seed, data)
                num_by_status[status] = num_by_status.get(status, 0) + 1
            after = await server.client.post(CHAT, content=chat())
            assert after.status_code == 200
        assert min(num_by_status[200], num_by_status[400]) > 40, num_by_status

    asyncio.run(main())
