"""What every request passes: ids, root path, counts, keys, other web sites; probes and /docs."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from html.parser import HTMLParser
from typing import Any

import httpx
import jsonschema
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import UserError
from jaxserve.server.routes import ROUTES
from jaxserve.server.security import check_server_config
from tests.fakes_engine import MODEL, FakeServer, echoes, fake_server

HI = [{"role": "user", "content": "hi"}]


def run(test: Callable[[FakeServer], Awaitable[None]], **config: Any) -> None:
    async def main() -> None:
        async with fake_server(echoes, **config) as server:
            await asyncio.wait_for(test(server), 10)

    asyncio.run(main())


async def counts(server: FakeServer) -> dict[tuple[str, str], float]:
    """jaxserve:http_requests_total by route and status."""
    text = (await server.client.get("/metrics")).text
    pattern = r'http_requests_total\{model_name="tiny",route="(.*)",status="(.*)"\} (.*)'
    return {(route, status): float(value) for route, status, value in re.findall(pattern, text)}


# --- request ids ---------------------------------------------------------------------------------


def test_a_request_id_comes_back_on_every_response() -> None:
    async def test(server: FakeServer) -> None:
        client = server.client
        given = {"x-request-id": "abc!~" + "x" * 123}
        body = {"model": MODEL, "prompt": "a"}
        for response in (
            await client.get("/health", headers=given),
            await client.get("/nowhere", headers=given),
            await client.put("/health", headers=given),
            await client.post("/v1/completions", json=body, headers=given),
            await client.post("/v1/completions", json=body | {"stream": True}, headers=given),
            await client.post("/v1/completions", content=b"{", headers=given),
        ):
            assert response.headers.get_list("x-request-id") == [given["x-request-id"]]

    run(test)


def test_without_one_it_is_the_response_s_or_new() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post("/v1/completions", prompt="a", request_id="mine")
        assert response.headers.get_list("x-request-id") == ["cmpl-mine"]
        ids = {(await server.client.get("/health")).headers["x-request-id"] for _ in range(3)}
        assert len(ids) == 3 and all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)

    run(test)


@pytest.mark.parametrize("bad", (b"", b"a b", b"\xc3\xa9", b"x" * 129, b"a\tb"))
def test_a_bad_request_id_is_refused(bad: bytes) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.client.get("/health", headers=[(b"x-request-id", bad)])
        assert response.status_code == 400
        assert "X-Request-Id" in response.json()["error"]["message"]
        assert response.headers["x-request-id"] != bad.decode("latin-1")

    run(test)


def test_two_request_ids_are_refused() -> None:
    async def test(server: FakeServer) -> None:
        headers = [("x-request-id", "a"), ("x-request-id", "b")]
        assert (await server.client.get("/health", headers=headers)).status_code == 400

    run(test)


# --- counts and paths ----------------------------------------------------------------------------


def test_requests_are_counted_by_route_and_status() -> None:
    async def test(server: FakeServer) -> None:
        client, key = server.client, {"authorization": "Bearer k"}
        await client.get("/health")
        await client.get("/health", headers={"x-request-id": "a b"})
        await client.put("/health", headers=key)
        await client.get("/v1/models")
        await client.get("/v1/models/a/b", headers=key)
        await client.get(f"/v1/models/{MODEL}", headers=key)
        for name in "abc":
            await client.get(f"/{name}", headers=key)
        body = {"model": MODEL, "prompt": "a", "stream": True}
        await client.post("/v1/completions", json=body, headers=key)
        found = await counts(server)
        assert found == {
            ("/health", "200"): 1,
            ("/health", "400"): 1,
            ("/health", "405"): 1,
            ("/v1/models", "401"): 1,
            ("/v1/models/{model:path}", "404"): 1,
            ("/v1/models/{model:path}", "200"): 1,
            ("other", "404"): 3,
            ("/v1/completions", "200"): 1,
        }
        assert (await counts(server))["/metrics", "200"] == 1

    run(test, api_key=("k",))


def test_a_bug_is_a_500_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: object) -> None:
        raise ZeroDivisionError

    async def test(server: FakeServer) -> None:
        monkeypatch.setattr(server.context.llm, "reset_prefix_cache", broken)
        transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post("/reset_prefix_cache")
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_server_error"
        with pytest.raises(ZeroDivisionError):  # so that it gets to the log
            await server.client.post("/reset_prefix_cache")
        assert (await counts(server))["/reset_prefix_cache", "500"] == 2

    run(test)


def test_head_and_allow() -> None:
    async def test(server: FakeServer) -> None:
        assert (await server.client.head("/health")).status_code == 200
        response = await server.client.delete("/ping")
        assert response.status_code == 405
        assert sorted(response.headers["allow"].split(", ")) == ["GET", "HEAD", "POST"]

    run(test)


def test_root_path() -> None:
    async def test(server: FakeServer) -> None:
        for path in ("/llm/v1/models", "/v1/models"):
            assert (await server.client.get(path)).status_code == 200
        assert (await server.client.get("/llmv1/models")).status_code == 404
        document = (await server.client.get("/llm/openapi.json")).json()
        assert document["servers"] == [{"url": "/llm"}]

    run(test, root_path="/llm")


# --- probes, load, adapters ----------------------------------------------------------------------


def test_ping_is_health() -> None:
    async def test(server: FakeServer) -> None:
        calls = [server.client.get, server.client.post]
        for call in calls:
            response = await call("/ping")
            assert (response.status_code, response.json()) == (200, {"status": "ok"})
        server.core.die("worker 0 was killed")
        while server.context.llm.dead_error is None:
            await asyncio.sleep(0)
        for call in calls:
            assert (await call("/ping")).status_code == 503

    run(test)


def test_load_counts_what_is_not_answered() -> None:
    async def test(server: FakeServer) -> None:
        async def load() -> int:
            return (await server.client.get("/load")).json()["server_load"]

        server.core.allow_steps(0)
        posted = [
            asyncio.ensure_future(server.post("/v1/completions", prompt="ab", stream=stream))
            for stream in (False, True, True)
        ]
        while len(server.core.running) < 3:
            await asyncio.sleep(0)
        assert await load() == 3
        server.core.allow_steps(None)
        await asyncio.gather(*posted)
        assert await load() == 0
        await server.post("/v1/completions", prompt=None)
        assert await load() == 0

    run(test)


@pytest.mark.parametrize("path", ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
def test_adapters(path: str) -> None:
    async def test(server: FakeServer) -> None:
        response = await server.post(path, lora_name="a", lora_path="/a")
        assert response.status_code == 501
        error = response.json()["error"]
        assert "LoRA" in error["message"]
        assert (error["type"], error["code"]) == ("not_implemented_error", "not_implemented")

    run(test)


# --- keys ----------------------------------------------------------------------------------------


def test_any_of_several_keys() -> None:
    async def test(server: FakeServer) -> None:
        async def status(**headers: str) -> int:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            return (await server.client.get("/v1/models", headers=given)).status_code

        for key in ("one", "two"):
            assert await status(authorization=f"Bearer {key}") == 200
            assert await status(x_api_key=key) == 200
        for key in ("", "on", "one ne", "onetwo", "one,two", "three"):
            assert await status(authorization=f"Bearer {key}") == 401
            assert await status(x_api_key=key) == 401
        assert await status(authorization="one") == 401
        assert await status() == 401

    run(test, api_key=("one", "two"))


def test_what_is_open() -> None:
    """Everything that generates or changes something asks for the key; new routes do by default."""

    async def test(server: FakeServer) -> None:
        is_open = set()
        for route in ROUTES:
            path = re.sub(r"\{.*?\}", "x", route.path)
            response = await server.client.request(route.method, path, json={})
            assert (response.status_code == 401) == (not route.is_open), path
            if route.is_open:
                is_open.add(route.path)
        assert is_open == {
            *("/health", "/ping", "/version", "/load", "/metrics", "/openapi.json", "/docs")
        }
        assert (await server.client.get("/nowhere")).status_code == 401
        assert (await server.client.get("/HEALTH")).status_code == 401
        assert server.core.requests == []

    run(test, api_key=("k",))


# --- other web sites -----------------------------------------------------------------------------

SITE = "https://chat.example"
PREFLIGHT = {"origin": SITE, "access-control-request-method": "POST"}


def test_no_web_site_may_ask_by_default() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.client.get("/health", headers={"origin": SITE})
        assert not any(name.startswith("access-control") for name in response.headers)
        response = await server.client.options("/v1/completions", headers=PREFLIGHT)
        assert response.status_code == 405

    run(test)


def test_a_named_web_site_may_ask() -> None:
    async def test(server: FakeServer) -> None:
        async def preflight(**more: str) -> httpx.Response:
            headers = PREFLIGHT | {name.replace("_", "-"): value for name, value in more.items()}
            return await server.client.options("/v1/completions", headers=headers)

        allowed = await preflight(access_control_request_headers="authorization, x-mine")
        assert allowed.status_code == 200  # without a key, as browsers ask
        assert allowed.headers["access-control-allow-origin"] == SITE
        assert (await preflight(origin="https://other.example")).status_code == 400
        assert (await preflight(access_control_request_method="PUT")).status_code == 400
        assert (await preflight(access_control_request_headers="x-other")).status_code == 400
        body = {"model": MODEL, "prompt": "ab", "stream": True}
        for key, status in (("k", 200), ("wrong", 401)):
            response = await server.client.post(
                "/v1/completions", json=body, headers={"origin": SITE, "x-api-key": key}
            )
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == SITE
            assert "X-Request-Id" in response.headers["access-control-expose-headers"]
            assert response.headers["access-control-allow-credentials"] == "true"
            assert "x-request-id" in response.headers

    run(
        test,
        api_key=("k",),
        allowed_origins=(SITE,),
        allowed_methods=("POST",),
        allowed_headers=("authorization", "x-mine"),
        allow_credentials=True,
    )


def test_any_web_site() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.client.options("/v1/completions", headers=PREFLIGHT)
        assert response.status_code == 200
        response = await server.client.get("/health", headers={"origin": SITE})
        assert response.headers["access-control-allow-origin"] == "*"

    run(test, allowed_origins=("*",))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (ServerConfig(allow_credentials=True), "without --allowed-origins"),
        (ServerConfig(allow_credentials=True, allowed_origins=("a", "*")), "any site"),
        (ServerConfig(root_path="llm"), "--root-path llm is not a path"),
        (ServerConfig(root_path="/llm/"), "--root-path /llm/ is not a path"),
        (ServerConfig(root_path="/"), "--root-path / is not a path"),
    ],
)
def test_options_that_do_nothing_or_too_much(config: ServerConfig, problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        check_server_config(config)


# --- /openapi.json and /docs ---------------------------------------------------------------------


def references(node: object) -> set[str]:
    """Every $ref in a document."""
    if isinstance(node, list):
        return set().union(*map(references, node))
    if not isinstance(node, dict):
        return set()
    found = set().union(*map(references, node.values()))
    return found | {node["$ref"]} if isinstance(node.get("$ref"), str) else found


def test_the_document_has_every_route_and_type() -> None:
    async def test(server: FakeServer) -> None:
        document = (await server.client.get("/openapi.json")).json()
        assert document["openapi"].startswith("3.1.")
        paths = document["paths"]
        operations = {(m.upper(), path) for path, methods in paths.items() for m in methods}
        assert operations == {(route.method, route.plain_path) for route in ROUTES}
        assert len(operations) == len(ROUTES)
        schemas = document["components"]["schemas"]
        prefix = "#/components/schemas/"
        assert references(document) == {prefix + name for name in schemas}
        for schema in schemas.values():
            jsonschema.Draft202012Validator.check_schema(schema)
        ids = [o["operationId"] for methods in paths.values() for o in methods.values()]
        assert len(set(ids)) == len(ids)
        for route in ROUTES:
            operation = paths[route.plain_path][route.method.lower()]
            assert ("security" in operation) == (not route.is_open)
            assert ("requestBody" in operation) == (route.request is not None)
            assert ("text/event-stream" in operation["responses"]["200"]["content"]) == (
                route.streams
            )

    run(test)


def test_answers_are_as_the_document_says() -> None:
    async def test(server: FakeServer) -> None:
        document = (await server.client.get("/openapi.json")).json()

        def check(method: str, path: str, response: httpx.Response) -> None:
            answers = document["paths"][path][method]["responses"]
            content = answers[str(response.status_code)]["content"]
            schema = content["application/json"]["schema"]
            whole = {**schema, "components": document["components"]}
            jsonschema.Draft202012Validator(whole).validate(response.json())

        for path in ("/health", "/version", "/load", "/v1/models", "/openapi.json"):
            check("get", path, await server.client.get(path))
        check("get", "/v1/models/{model}", await server.client.get(f"/v1/models/{MODEL}"))
        check("get", "/v1/models/{model}", await server.client.get("/v1/models/other"))
        check("post", "/v1/load_lora_adapter", await server.post("/v1/load_lora_adapter"))
        check("post", "/v1/completions", await server.post("/v1/completions", prompt="ab"))
        check("post", "/v1/completions", await server.post("/v1/completions"))
        for more in ({}, {"logprobs": True, "n": 2}, {"model": "other"}):
            response = await server.post("/v1/chat/completions", messages=HI, **more)
            check("post", "/v1/chat/completions", response)

    run(test)


class Page(HTMLParser):
    """Counts what a page has; nothing may come from elsewhere."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe"), tag
        given = dict(attrs)
        assert not {"src", "onclick", "onload"} & set(given)
        if tag != "meta":
            self.open.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if "href" in given else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_every_route_and_type() -> None:
    async def test(server: FakeServer) -> None:
        response = await server.client.get("/docs")
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        page = Page(response.text)
        assert page.open == []
        document = (await server.client.get("/openapi.json")).json()
        assert all(route.plain_path in page.text for route in ROUTES)
        assert set(page.ids) == set(document["components"]["schemas"])
        inside = {link[1:] for link in page.links if link.startswith("#")}
        assert inside <= set(page.ids)
        assert [link for link in page.links if not link.startswith("#")] == ["openapi.json"]
        fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
        assert all(name in page.text for name in fields)

    run(test)
