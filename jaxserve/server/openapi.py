"""The OpenAPI 3.1 document of a table of routes, from the msgspec types of their bodies."""

import http
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve import __version__
from jaxserve.server.routing import Route

type Document = dict[str, Any]

_EVENT_STREAM = "text/event-stream"


def make_document(routes: Sequence[Route], root_path: str = "") -> Document:
    """The whole document; every type is in `components.schemas` once.

    root_path: under which path of its host the server is seen.
    """
    types = _body_types(routes)
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema_of = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, Document] = {}
    for route in routes:
        paths.setdefault(route.plain_path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxserve",
            "version": __version__,
            "description": "Fields that nobody knows are allowed and have no effect.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"api_key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _body_types(routes: Sequence[Route]) -> list[Any]:
    """Every type that a body has, once."""
    found = {
        id(kind): kind
        for route in routes
        for kind in (route.request, route.response, route.event, route.error)
        if kind is not None
    }
    return list(found.values())


def _operation(route: Route, schema_of: dict[int, Document]) -> Document:
    operation: Document = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "responses": _responses(route, schema_of),
    }
    if route.path_params:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.path_params
        ]
    if route.request is not None:
        body = {"application/json": {"schema": schema_of[id(route.request)]}}
        operation["requestBody"] = {"required": True, "content": body}
    if not route.is_open:
        operation["security"] = [{"api_key": []}]
    return operation


def _operation_id(route: Route) -> str:
    words = route.plain_path.replace("{", "by_").replace("}", "")
    return f"{route.method.lower()}{words.replace('/', '_').replace('.', '_')}"


def _responses(route: Route, schema_of: dict[int, Document]) -> Document:
    text = {"type": "string"}
    content = {
        route.content_type: {
            "schema": text if route.response is None else schema_of[id(route.response)]
        }
    }
    if route.streams:
        event = None if route.event is None else schema_of[id(route.event)]
        content[_EVENT_STREAM] = {"schema": text if event is None else _events(event)}
    responses = {"200": {"description": "The answer.", "content": content}}
    error = {"application/json": {"schema": schema_of[id(route.error)]}}
    for status in route.all_errors:
        description = f"{http.HTTPStatus(status).phrase}."
        responses[str(status)] = {"description": description, "content": error}
    return responses


def _events(event: Document) -> Document:
    """Text, and which type the JSON behind each `data:` has."""
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": event}
