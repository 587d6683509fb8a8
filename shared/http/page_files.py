"""Serves the style sheets and the script of pages, which browsers may keep: their addresses name their version."""

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope
from typing_extensions import override

from shared.pages.environment import STATIC, STATIC_PATH


class _Files(StaticFiles):
    @override
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        if response.status_code == 200 and b"v=" in scope["query_string"]:
            response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def install(app: Starlette) -> None:
    """Serve them under STATIC_PATH."""
    app.mount(STATIC_PATH, _Files(directory=STATIC), name="page-files")
