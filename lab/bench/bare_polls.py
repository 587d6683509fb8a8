"""The floor of long polls: the same requests answered by a bare web server, without tokens, database or validation."""

import asyncio
import logging
import socket

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


def create_app() -> Starlette:
    """Return an application whose polls wait until somebody opens the round."""
    is_open = asyncio.Event()

    async def get_task(request: Request) -> JSONResponse:
        try:
            await asyncio.wait_for(is_open.wait(), float(request.query_params["wait"]))
        except TimeoutError:
            return JSONResponse({"action": "wait", "ticket": "wait-0-0"})
        return JSONResponse({"action": "train", "ticket": "train-1-0"})

    async def open_round(_request: Request) -> JSONResponse:
        is_open.set()
        return JSONResponse({})

    return Starlette(routes=[Route("/v1/task", get_task), Route("/start", open_round, methods=["POST"])])


def main() -> None:
    """Serve on a free port of this computer until terminated."""
    logging.basicConfig(level=logging.INFO)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        logging.getLogger("floor").info("listening on http://127.0.0.1:%d", listening.getsockname()[1])
        config = uvicorn.Config(create_app(), access_log=False, log_config=None)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
