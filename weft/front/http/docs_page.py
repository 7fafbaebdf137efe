"""The API's description as a page: plain HTML made from the OpenAPI document, without external resources."""

from __future__ import annotations

import json
import re
import shlex
from html import escape
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

_HOST = re.compile(r"(?:[A-Za-z0-9.\-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 64},
}
"""Route -> example body, without ``model``."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem 1rem 4rem;
  color: #1c2024; background: #fff; }
h1 { margin-bottom: 0; }
h2 { margin: 2.5rem 0 .25rem; padding-top: .75rem; border-top: 1px solid #d5d9de; font-size: 1.15rem; }
h2 code { font-size: 1.15rem; }
h3 { margin: 1rem 0 .25rem; font-size: 1rem; }
code, pre { font: .875rem/1.45 ui-monospace, monospace; }
pre { background: #f3f5f7; border: 1px solid #d5d9de; border-radius: .3rem; padding: .6rem .8rem;
  overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0;
  border-bottom: 1px solid #e8ebee; }
.method { color: #0b5c8a; display: inline-block; min-width: 3.5rem; }
nav ul { list-style: none; padding: 0; }
@media (prefers-color-scheme: dark) {
  body { color: #e3e6e9; background: #15181b; }
  pre { background: #1e2226; border-color: #343a40; }
  h2, th, td { border-color: #343a40; }
  a { color: #7cc4f0; } .method { color: #7cc4f0; }
}
"""


def answer(document: dict[str, Any], model: str, request: Request, root_path: str = "") -> Response:
    """Return the HTML page of the OpenAPI ``document``, with a strict content security policy.

    The examples use ``model`` and the address of the request's Host header, under ``root_path``. A missing or
    malformed Host becomes 127.0.0.1:8000.
    """
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        host = "127.0.0.1:8000"
    page = render(document, model, f"{request.url.scheme}://{host}{root_path}")
    headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return Response(page, headers=headers, media_type="text/html; charset=utf-8")


def render(document: dict[str, Any], model: str, url: str) -> str:
    """Return an OpenAPI ``document`` as HTML. ``model`` and ``url`` are for the examples."""
    schemas = document["components"]["schemas"]
    routes = [
        (method.upper(), path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        '<p>The OpenAI-compatible API of this server. For programs: <a href="openapi.json">openapi.json</a>.'
        " If the server has a key, send it as <code>Authorization: Bearer KEY</code> or as"
        " <code>x-api-key: KEY</code>.</p>",
        "<nav><ul>",
        *(f'<li><a href="#{_anchor(m, p)}">{_name(m, p)}</a></li>' for m, p, _ in routes),
        "</ul></nav>",
    ]
    for method, path, operation in routes:
        parts += _route(method, path, operation, schemas, model, url)
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _route(
    method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any], model: str, url: str
) -> list[str]:
    """Return the HTML of one route: heading, text, tables of parameters and body, statuses, and a command."""
    parts = [f'<h2 id="{_anchor(method, path)}">{_name(method, path)}</h2>']
    text = operation.get("description", "").strip()
    parts += [f"<p>{escape(paragraph)}</p>" for paragraph in text.split("\n\n") if paragraph]
    parameters = operation.get("parameters", [])
    if parameters:
        rows = [(p["name"], f"{p['schema'].get('type', 'any')}, in the {p['in']}", True) for p in parameters]
        parts += ["<h3>Parameters</h3>", _table(rows)]
    body = _body_schema(operation, schemas)
    if body is not None:
        required = set(body.get("required", []))
        rows = [
            (name, _type(schema, schemas), name in required) for name, schema in body["properties"].items()
        ]
        parts += ["<h3>Body</h3>", _table(sorted(rows, key=lambda row: (not row[2], row[0])))]
    statuses = ", ".join(sorted(operation.get("responses", {})))
    parts.append(f"<p>Answers: {escape(statuses)}</p>")
    parts.append(f"<pre>{escape(_curl(method, path, model, url))}</pre>")
    return parts


def _table(rows: list[tuple[str, str, bool]]) -> str:
    """Return an HTML table. ``rows``: name, type, True if required."""
    lines = [
        f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{'yes' if needed else ''}</tr>"
        for name, kind, needed in rows
    ]
    return "<table><tr><th>name</th><th>type</th><th>required</th></tr>" + "".join(lines) + "</table>"


def _body_schema(operation: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema of the operation's body; None without a body."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return None if content is None else schemas[_referred(content["schema"])]


def _referred(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _type(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return a JSON schema in a few words. Null means absent and is left out."""
    if "$ref" in schema:
        fields = schemas[_referred(schema)]["properties"]
        return f"object of {', '.join(fields)}"
    if "anyOf" in schema:
        options = [option for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(_type(option, schemas) for option in options)
    kind = str(schema.get("type", "any"))
    if kind == "array" and schema.get("items"):
        return f"array of {_type(schema['items'], schemas)}"
    return kind


def _curl(method: str, path: str, model: str, url: str) -> str:
    """Return a ``curl`` command for a request to the route. Routes in ``_EXAMPLES`` get a body."""
    target = url + path.replace("{model}", quote(model))
    if path in _EXAMPLES:
        body = json.dumps({"model": model, **_EXAMPLES[path]})
        return f"curl {shlex.quote(target)} -H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}"
    return f"curl {'' if method == 'GET' else f'-X {method} '}{shlex.quote(target)}"


def _name(method: str, path: str) -> str:
    return f'<code><span class="method">{escape(method)}</span> {escape(path)}</code>'


def _anchor(method: str, path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{method} {path}".lower()).strip("-")
