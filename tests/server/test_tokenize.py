"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from typing import Any

import pytest

from tests.fakes_engine import FakeServer
from tests.server.test_options import run
from tests.server.test_routes import HI, HI_PROMPT, NUM_HI_TOKENS


async def tokens(server: FakeServer, **body: Any) -> dict:
    response = await server.client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text() -> None:
    async def test(server: FakeServer) -> None:
        assert await tokens(server, prompt="é the", model="tiny") == {
            "count": 3,
            "max_model_len": 200,
            "tokens": [0xC3, 0xA9, 258],
            "token_strs": None,
        }
        spelled = await tokens(server, prompt="é the", return_token_strs=True)
        assert spelled["token_strs"] == ["Ã", "©", "Ġthe"]
        assert (await tokens(server, prompt=""))["tokens"] == []
        assert (await tokens(server, prompt="x" * 9999))["count"] == 9999, "longer than the context"

    run(test)


def test_a_chat() -> None:
    async def test(server: FakeServer) -> None:
        async def rendered(**options: Any) -> str:
            found = await tokens(server, messages=HI, **options)
            response = await server.client.post("/detokenize", json={"tokens": found["tokens"]})
            return response.json()["prompt"]

        assert (await tokens(server, messages=HI))["count"] == NUM_HI_TOKENS
        assert await rendered() == HI_PROMPT
        without = HI_PROMPT.removesuffix("<|im_start|>assistant\n")
        assert await rendered(add_generation_prompt=False) == without
        assert (await rendered(chat_template_kwargs={"shout": True})).endswith("!")
        continued = await rendered(continue_final_message=True, add_generation_prompt=False)
        assert continued == "<|im_start|>user\nhi"
        long = [{"role": "user", "content": "x" * 5000}]
        assert (await tokens(server, messages=long))["count"] > 5000

    run(test)


def test_a_chat_template_of_the_request_needs_trust() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.client.post(
            "/tokenize", json={"messages": HI, "chat_template": "{{ messages[0].content }}"}
        )
        assert response.json()["error"]["param"] == "chat_template"

    run(test)


def test_a_text_back() -> None:
    async def test(server: FakeServer) -> None:
        body = {"tokens": [256, 0xC3, 0xA9, 258], "model": "tiny"}
        response = await server.client.post("/detokenize", json=body)
        assert response.json() == {"prompt": "<|im_start|>é the"}

    run(test)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    (
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "tools": [{"type": "function"}]}, 400, "tools"),
        ("/tokenize", {"prompt": "x", "continue_final_message": True}, 400, "continue_final_messa"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 300]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ),
)
def test_bad_requests(path: str, body: dict, status: int, param: str) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.client.post(path, json=body)
        assert response.status_code == status
        assert response.json()["error"]["param"].startswith(param)

    run(test)


def test_the_tokenizer() -> None:
    async def test(server: FakeServer) -> None:
        found = (await server.client.get("/tokenizer_info")).json()
        tokenizer = server.context.renderer.tokenizer
        assert found["eos_token"] == tokenizer.special_tokens["eos_token"]
        assert found["bos_token"] == tokenizer.special_tokens.get("bos_token")
        assert found["chat_template"] == tokenizer.chat_template is not None
        assert set(found) == {"bos_token", "eos_token", "pad_token", "unk_token", "chat_template"}

    run(test)
