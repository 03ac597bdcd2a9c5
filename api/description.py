"""/openapi.json made whole, and /docs made from it: a page of plain HTML that loads nothing from anywhere.

What the framework cannot know is put in here for every operation at once: that keys are needed, that any
failure has the one form, and which headers each answer carries.
"""

import html
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from api.problems import MEDIA_TYPE

PROBLEM = {"$ref": "#/components/schemas/ProblemBody"}
_METHODS = ("get", "post", "patch", "delete")
_SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"api_key": []}]
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key: mk_..."},
    "api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code,pre{background:#f3f3f3}"
)
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def describe(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Return what makes the description of an application, once."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            app.openapi_schema = _completed(document)
        return app.openapi_schema

    return openapi


def add_docs_page(app: FastAPI) -> None:
    """Serve the description as a page."""

    @app.get("/docs", include_in_schema=False)
    async def get_docs() -> HTMLResponse:
        return HTMLResponse(_page(app.openapi()), headers=_HEADERS)


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    components["securitySchemes"] = _SCHEMES
    for name in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(name, None)
    for path, operations in document["paths"].items():
        for method in _METHODS:
            if method in operations:
                _complete(path, method, operations[method])
    return document


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # the framework's own form, which is never sent
    if path.startswith("/v1/"):
        operation["security"] = _SECURITY
        for status in ("4XX", "5XX"):
            responses[status] = {
                "description": "Any failure: see `code`.",
                "content": {MEDIA_TYPE: {"schema": PROBLEM}},
            }
    if method == "post" and path.startswith("/v1/"):
        key = {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!#-~]+$"},
        }
        operation.setdefault("parameters", []).append(key)


def _page(document: dict[str, Any]) -> str:
    parts = [f"<h1>{_text(document['info']['title'])}</h1><p>{_text(document['info']['description'])}</p>"]
    parts.append('<p>The whole description: <a href="/openapi.json">/openapi.json</a>.</p>')
    for path, operations in document["paths"].items():
        given = (method for method in _METHODS if method in operations)
        parts += [_operation(method, path, operations[method]) for method in given]
    title = _text(document["info"]["title"])
    return f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>{''.join(parts)}"


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        f"<li><code>{_text(parameter['name'])}</code> ({_text(parameter['in'])}) "
        f"{_text(parameter.get('description') or parameter['schema'].get('description', ''))}</li>"
        for parameter in operation.get("parameters", [])
    ]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        names = ", ".join(content.get("schema", {}).get("properties", {}))
        rows.append(f"<li>{_text(media_type)}: <code>{_text(names)}</code></li>")
    said = operation.get("description") or operation.get("summary", "")
    return f"<h2><code>{method.upper()} {_text(path)}</code></h2><p>{_text(said)}</p><ul>{''.join(rows)}</ul>"


def _text(value: object) -> str:
    return html.escape(str(value))
