"""Page at ``/``: model, load and a chat box in one HTML document without external resources."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources

from starlette.responses import Response


@functools.cache
def _page() -> tuple[bytes, str]:
    """Return (the document, its content security policy)."""
    files = resources.files(__package__)
    style = files.joinpath("page.css").read_text(encoding="utf-8")
    script = files.joinpath("page.js").read_text(encoding="utf-8")
    html = files.joinpath("index.html").read_text(encoding="utf-8")
    fleet = files.joinpath("fleet.js").read_text(encoding="utf-8")
    html = html.replace("/*page.css*/", style).replace("/*page.js*/", script).replace("/*fleet.js*/", fleet)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src {_hash(style)}; "
        f"script-src {_hash(script)} {_hash(fleet)}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), policy


def _hash(text: str) -> str:
    """Return the hash source of ``text`` for a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def answer() -> Response:
    """Return the page. The page contains no data of the server; its script fetches all data with the
    reader's key."""
    html, policy = _page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(html, headers=headers, media_type="text/html; charset=utf-8")
