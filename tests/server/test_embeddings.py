"""POST /v1/embeddings over a scripted engine."""

import base64
from typing import Any

import numpy as np
import pytest

from jaxserve.messages import SamplingParams as CoreSamplingParams
from jaxserve.server.protocol.decoding import BodyDecoder
from jaxserve.server.protocol.embeddings import UNSUPPORTED_IN_EMBEDDINGS, EmbeddingRequest
from tests.fakes_engine import MODEL, FakeServer, fake_embedding, says
from tests.server.test_bad_input import GENERATING, LABELS
from tests.server.test_options import run

EMBEDDINGS = "/v1/embeddings"
AB = list(b"ab")


def normalized(vector: list[float]) -> list[float]:
    array = np.array(vector, "<f4").astype(float)
    return (array / np.linalg.norm(array)).astype("<f4").tolist()


async def vectors(server: FakeServer, **body: Any) -> list[list[float]]:
    response = await server.post(EMBEDDINGS, **body)
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


def test_an_answer() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(EMBEDDINGS, input=["ab", "c"], request_id="r", user="u")
        assert response.headers["x-request-id"] == "embd-r"
        body = response.json()
        assert isinstance(body.pop("created"), int)
        assert body == {
            "id": "embd-r",
            "object": "list",
            "model": MODEL,
            "data": [
                {
                    "object": "embedding",
                    "index": i,
                    "embedding": normalized(fake_embedding(token_ids, "last")),
                }
                for i, token_ids in enumerate((AB, [99]))
            ],
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        }
        first, _ = server.core.requests
        assert first.prompt_token_ids == AB
        assert first.sampling == CoreSamplingParams(max_tokens=1, temperature=0.0, pooling="last")
        assert server.context.metrics.generation_tokens == 0

    run(test)


@pytest.mark.parametrize(
    ("given", "prompts"),
    (("ab", [AB]), (["ab", "c"], [AB, [99]]), (AB, [AB]), ([AB, [99]], [AB, [99]])),
)
def test_inputs_of_every_kind(given: object, prompts: list) -> None:
    async def test(server: FakeServer) -> None:
        expected = [fake_embedding(token_ids, "last") for token_ids in prompts]
        assert await vectors(server, input=given, normalize=False) == expected

    run(test)


@pytest.mark.parametrize("pooling", ("last", "mean", "cls"))
def test_pooling_is_the_servers_unless_the_request_has_its_own(pooling: str) -> None:
    async def test(server: FakeServer) -> None:
        expected = [fake_embedding(AB, pooling)]
        assert await vectors(server, input=AB, normalize=False) == expected
        for own in ("last", "mean", "cls"):
            found = await vectors(server, input=AB, normalize=False, pooling=own)
            assert found == [fake_embedding(AB, own)]

    run(test, pooling=pooling)


@pytest.mark.parametrize(
    ("options", "is_normalized"),
    (
        ({}, True),
        ({"normalize": False}, False),
        ({"use_activation": False}, False),
        ({"normalize": True, "use_activation": True}, True),
    ),
)
def test_normalization(options: dict, is_normalized: bool) -> None:
    async def test(server: FakeServer) -> None:
        (vector,) = await vectors(server, input=AB, **options)
        expected = fake_embedding(AB, "last")
        assert vector == (normalized(expected) if is_normalized else expected)

    run(test)


@pytest.mark.parametrize("normalize", (False, True))
def test_fewer_dimensions_are_cut_before_the_length_is_1(normalize: bool) -> None:
    async def test(server: FakeServer) -> None:
        (vector,) = await vectors(server, input=AB, dimensions=3, normalize=normalize)
        expected = fake_embedding(AB, "last")[:3]
        assert vector == (normalized(expected) if normalize else expected)

    run(test)


def test_base64_is_the_same_numbers() -> None:
    async def test(server: FakeServer) -> None:
        numbers = await vectors(server, input=["ab", "c"])
        encoded = await vectors(server, input=["ab", "c"], encoding_format="base64")
        decoded = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in encoded]  # pyright: ignore[reportArgumentType]
        assert decoded == numbers

    run(test)


def test_a_vector_of_zeros_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes_engine.fake_embedding", lambda *args: [0.0] * 8)

    async def test(server: FakeServer) -> None:
        assert await vectors(server, input="a") == [[0.0] * 8]

    run(test)


@pytest.mark.parametrize(
    ("options", "kept"),
    (
        ({"truncate_prompt_tokens": 2}, "yz"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
        ({"truncate_prompt_tokens": -1}, "b" * 197 + "yz"),
    ),
)
def test_an_input_that_is_too_long(options: dict, kept: str) -> None:
    async def test(server: FakeServer) -> None:
        text = "ab" + "b" * 300 + "yz"
        response = await server.post(EMBEDDINGS, input=["a", text])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "input[1]")
        response = await server.post(EMBEDDINGS, input=text, **options)
        assert response.json()["usage"]["prompt_tokens"] == len(kept)
        assert bytes(server.core.requests[-1].prompt_token_ids) == kept.encode()

    run(test)


@pytest.mark.parametrize(
    ("body", "param", "text"),
    (
        ({}, "input", "missing"),
        ({"input": ""}, "input", "no tokens"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", 1]}, "input[1]", "mixture"),
        ({"input": [1, 300]}, "input[1]", "vocabulary"),
        ({"input": ["a"] * 2049}, "input", "up to 2048"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and 8"),
        ({"input": "a", "dimensions": 9}, "dimensions", "between 1 and 8"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "Invalid enum"),
        ({"input": "a", "pooling": "max"}, "pooling", "Invalid enum"),
        ({"input": "a", "normalize": True, "use_activation": False}, "use_activation", "differ"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "priority": 1}, "priority", "--scheduling-policy"),
        ({"input": "a", "cache_salt": ""}, "cache_salt", "empty"),
        ({"input": "a", "request_id": ""}, "request_id", "ASCII"),
        ({"input": "a", "messages": []}, "messages", "not supported"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ({"input": "a", "stream": True}, "stream", "or set it to false"),
        ({"input": "a", "max_tokens": 5}, "max_tokens", "Leave it out."),
        ({"input": "a", "temperature": 0}, "temperature", "or set it to 1"),
        ({"input": "a", "embedding_types": ["int8"]}, "embedding_types", 'set it to ["float"]'),
        ({"input": "a", "output_dtype": "int8"}, "output_dtype", 'or set it to "float"'),
        ({"input": "a", "output_dimension": 4}, "output_dimension", "Use dimensions."),
        ({"input": "a", "input_type": "query"}, "input_type", "not supported"),
        ({"input": "a", "truncate": "END"}, "truncate", "Use truncate_prompt_tokens."),
    ),
)
def test_bad_requests(body: dict, param: str, text: str) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(EMBEDDINGS, **body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert text in error["message"]
        assert server.core.requests == []

    run(test)


def test_what_does_nothing_here_is_refused_by_name() -> None:
    async def test(server: FakeServer) -> None:
        for name, neutral in UNSUPPORTED_IN_EMBEDDINGS.items():
            response = await server.post(EMBEDDINGS, input="a", **{name: 7})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
            assert server.core.requests == []
            for value in (None, *neutral):
                await vectors(server, input="a", **{name: value})
            server.core.requests.clear()

    run(test)


@pytest.mark.parametrize("decoder", GENERATING, ids=lambda decoder: decoder.kind.__name__)
def test_no_option_of_generation_is_ignored(decoder: BodyDecoder) -> None:
    known = {*EmbeddingRequest.__struct_fields__, *UNSUPPORTED_IN_EMBEDDINGS}
    assert set(decoder.kind.__struct_fields__) - known - LABELS == set()


def test_another_model_is_404() -> None:
    async def test(server: FakeServer) -> None:
        assert (await server.post(EMBEDDINGS, model="x", input="a")).status_code == 404

    run(test)


def test_salt_and_priority_reach_the_engine() -> None:
    async def test(server: FakeServer) -> None:
        await vectors(server, input="a", cache_salt="s", priority=-3)
        (request,) = server.core.requests
        assert (request.cache_salt, request.priority) == ("s", -3)

    run(test, says(""), scheduling_policy="priority")


def test_special_tokens_are_the_tokenizers() -> None:
    async def test(server: FakeServer) -> None:
        seen = []
        tokenizer = server.context.renderer.tokenizer
        encode = tokenizer.encode

        def spying_encode(text: str, *, add_special_tokens: bool) -> list[int]:
            seen.append(add_special_tokens)
            return encode(text, add_special_tokens=add_special_tokens)

        tokenizer.encode = spying_encode
        await vectors(server, input="a")
        await vectors(server, input="a", add_special_tokens=False)
        assert seen == [True, False]

    run(test)
