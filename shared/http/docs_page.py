"""The interactive API page, served from local files: a hospital's network may not reach other hosts."""

import base64
import hashlib
import re
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from shared.http.security_headers import CONTENT_SECURITY_POLICY

_ASSETS = "/docs-assets"
_FILES = Path(fastapi_offline.__file__).parent / "static"
_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def install(app: FastAPI) -> None:
    """Serve the page at /docs."""
    app.mount(_ASSETS, StaticFiles(directory=_FILES), name="docs-assets")

    @app.get("/docs", include_in_schema=False)
    def docs(request: Request) -> HTMLResponse:
        prefix = str(request.scope.get("root_path", "")).rstrip("/")
        page = get_swagger_ui_html(
            openapi_url=f"{prefix}/openapi.json",
            title=app.title,
            swagger_js_url=f"{prefix}{_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{prefix}{_ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{prefix}{_ASSETS}/favicon.png",
        )
        page.headers["Content-Security-Policy"] = _policy_for(bytes(page.body).decode())
        return page


def _policy_for(page: str) -> str:
    """Return the usual policy, extended to allow the page's inline script and the styles Swagger UI writes."""
    scripts = [hashlib.sha256(script.encode()).digest() for script in _INLINE_SCRIPT.findall(page)]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in scripts)
    return CONTENT_SECURITY_POLICY.replace("script-src 'self'", f"script-src 'self' {allowed}").replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'"
    )
