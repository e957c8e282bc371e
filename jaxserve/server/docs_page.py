"""The page at /docs: an OpenAPI document as HTML, without scripts and from nowhere else."""

import html
import json
from collections.abc import Iterable
from typing import Any

type _Schema = dict[str, Any]

_REF = "#/components/schemas/"
_STYLE = """
:root { --ink:#1c2330; --soft:#5b6675; --line:#dfe3ea; --paper:#fff; --ground:#f5f7fa;
  --link:#1557b0; --get:#1f7a4d; --post:#1557b0; --delete:#b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6e9ef; --soft:#9aa5b5; --line:#333b48;
  --paper:#1b2028; --ground:#12161c; --link:#8ab4f8; --get:#57bb8a; --post:#8ab4f8;
  --delete:#f28b82; } }
* { box-sizing:border-box }
body { margin:0; background:var(--ground); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
main { max-width:980px; margin:0 auto; padding:32px 20px 80px }
h1 { font-size:28px; margin:0 } h2 { font-size:19px; margin:40px 0 12px }
h3 { font-size:14px; margin:18px 0 6px; color:var(--soft); font-weight:600 }
p { margin:6px 0 } a { color:var(--link); text-decoration:none }
a:hover { text-decoration:underline }
code { font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace }
.lead { color:var(--soft) }
details { background:var(--paper); border:1px solid var(--line); border-radius:8px; margin:8px 0 }
summary { cursor:pointer; padding:10px 14px; display:flex; gap:12px; align-items:baseline;
  flex-wrap:wrap; list-style:none }
summary::-webkit-details-marker { display:none }
summary:hover { background:var(--ground); border-radius:8px }
.body { padding:0 14px 14px; border-top:1px solid var(--line); overflow-x:auto }
.method { font:600 12px ui-monospace,Menlo,Consolas,monospace; min-width:54px }
.get { color:var(--get) } .post { color:var(--post) } .delete { color:var(--delete) }
.path { font-weight:600 } .what { color:var(--soft); flex:1; text-align:right }
.tag { font-size:12px; color:var(--soft); border:1px solid var(--line); border-radius:10px;
  padding:1px 8px }
table { border-collapse:collapse; width:100%; margin-top:8px }
th { text-align:left; font-size:12px; color:var(--soft); font-weight:600 }
th,td { padding:6px 14px 6px 0; border-bottom:1px solid var(--line); vertical-align:top }
tr:last-child td { border-bottom:0 } .must { color:var(--delete) }
"""


def make_page(document: dict[str, Any]) -> bytes:
    """The whole page."""
    info, schemas = document["info"], document["components"]["schemas"]
    routes = [
        _route(method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    types = [_type(name, schema) for name, schema in sorted(schemas.items())]
    title = f"{_text(info['title'])} {_text(info['version'])}"
    page = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>",
        f'<h1>{title}</h1><p class="lead">{_text(info["description"])} For programs: ',
        '<a href="openapi.json">openapi.json</a>.</p>',
        f"<h2>Routes</h2>{''.join(routes)}<h2>Types</h2>{''.join(types)}</main></body></html>",
    ]
    return "".join(page).encode()


def _text(value: str) -> str:
    return html.escape(value)


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    tags = '<span class="tag">key</span>' if "security" in operation else ""
    content = operation["responses"]["200"]["content"]
    if "text/event-stream" in content:
        tags += '<span class="tag">stream</span>'
    parts = []
    if "requestBody" in operation:
        parts.append("<h3>Body</h3>" + _contents(operation["requestBody"]["content"]))
    parts.append("<h3>Answer</h3>" + _contents(content))
    errors = [
        f"<code>{status}</code> {_text(response['description'].rstrip('.'))}"
        for status, response in operation["responses"].items()
        if status != "200"
    ]
    parts.append(f"<h3>Errors</h3><p>{' &middot; '.join(errors)}</p>")
    return (
        f'<details><summary><span class="method {method}">{method.upper()}</span>'
        f'<code class="path">{_text(path)}</code>{tags}'
        f'<span class="what">{_text(operation["summary"])}</span></summary>'
        f'<div class="body">{"".join(parts)}</div></details>'
    )


def _contents(content: dict[str, Any]) -> str:
    """A line for each media type."""
    lines = []
    for kind, media in content.items():
        schema = media["schema"]
        inner = schema.get("contentSchema")
        shown = "text" if inner is None and schema.get("type") == "string" else _shape(schema)
        shown = f"events of {_shape(inner)}" if inner is not None else shown
        lines.append(f"<p>{shown} <code>{_text(kind)}</code></p>")
    return "".join(lines)


def _type(name: str, schema: _Schema) -> str:
    rows = [
        _row(field, shape, field in schema.get("required", ()))
        for field, shape in schema.get("properties", {}).items()
    ]
    head = "<tr><th>field</th><th>type</th><th>default</th><th></th></tr>"
    body = f"<table>{head}{''.join(rows)}</table>" if rows else f"<p>{_shape(schema)}</p>"
    about = _text(schema.get("description", "").partition("\n\n")[0])
    return (
        f'<details id="{_text(name)}" open><summary><code class="path">{_text(name)}</code>'
        f'<span class="what">{about}</span></summary><div class="body">{body}</div></details>'
    )


def _row(field: str, schema: _Schema, is_required: bool) -> str:
    default = '<span class="must">required</span>'
    if not is_required:
        value = schema.get("default")
        default = "" if value is None else f"<code>{_text(json.dumps(value))}</code>"
    about = _text(schema.get("description", ""))
    return (
        f"<tr><td><code>{_text(field)}</code></td><td>{_shape(schema)}</td>"
        f"<td>{default}</td><td>{about}</td></tr>"
    )


def _shape(schema: _Schema) -> str:
    """A schema in words; names of types are links."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f'<a href="#{_text(name)}">{_text(name)}</a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_unique(_shape(part) for part in schema[several]))
    if "const" in schema:
        return f"<code>{_text(json.dumps(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{_text(json.dumps(v))}</code>" for v in schema["enum"])
    match schema.get("type"):
        case "array":
            items = schema.get("items")
            return f"list of {_shape(items)}" if isinstance(items, dict) and items else "list"
        case "object":
            values = schema.get("additionalProperties")
            return (
                f"object of {_shape(values)}" if isinstance(values, dict) and values else "object"
            )
        case str() as kind:
            return _text(kind) + _bounds(schema)
    return "anything"


def _bounds(schema: _Schema) -> str:
    words = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"))
        if key in schema
    ]
    return f" {' '.join(words)}" if words else ""


def _unique(parts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(parts))
