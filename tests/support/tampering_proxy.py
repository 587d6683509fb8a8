"""A reverse proxy on a real socket that can change the coordinator's answers."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import httpx


@dataclass(frozen=True)
class Reply:
    """An HTTP response."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class TamperingProxy:
    """Answers each request with `tamper(path, ask)`, where `ask()` returns the coordinator's own answer."""

    def __init__(self, target_url: str) -> None:
        self._paths: list[str] = []
        self._news = threading.Condition()
        self.tamper: Callable[[str, Callable[[], Reply]], Reply] = lambda _path, ask: ask()
        self._http = httpx.Client(base_url=target_url, timeout=60, trust_env=False)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                proxy.note(self.path)
                content = self.rfile.read(int(self.headers.get("content-length", 0)))
                reply = proxy.tamper(self.path, lambda: proxy.ask(self.command, self.path, self.headers, content))
                self.send_response(reply.status)
                for name, value in ({"Content-Length": str(len(reply.body))} | dict(reply.headers)).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

            do_GET = do_PUT = do_PATCH = do_POST = _handle  # noqa: N815 - http.server looks for these names

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Print no traceback when a stopping agent hangs up."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def note(self, path: str) -> None:
        """Record a request."""
        with self._news:
            self._paths.append(path)
            self._news.notify_all()

    def count(self, start: str) -> int:
        """Return the number of requests so far whose path starts like this."""
        return sum(path.startswith(start) for path in self._paths)

    def wait_for(self, start: str, more: int) -> None:
        """Wait for this many more requests whose path starts like this."""
        wanted = self.count(start) + more
        with self._news:
            assert self._news.wait_for(lambda: self.count(start) >= wanted, 60)

    def ask(self, method: str, path: str, headers: Mapping[str, str], content: bytes) -> Reply:
        """Forward a request to the coordinator and return its answer."""
        passed = {name: value for name, value in headers.items() if name.lower() not in ("host", "connection")}
        answer = self._http.request(method, path, headers=passed, content=content)
        kept = {name: value for name in ("etag", "content-type") if (value := answer.headers.get(name))}
        return Reply(answer.status_code, answer.content, kept)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._http.close()
