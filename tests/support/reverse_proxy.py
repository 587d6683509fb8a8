"""Caddy and nginx with the configurations in deploy/."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import trustme
from support.processes import LoggedProcess
from support.programs import needs
from support.tls import write_certificate

from shared.http.server_tls import Tls

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROXIES = ("caddy", "nginx")


@contextmanager
def reverse_proxy(
    kind: str,
    folder: Path,
    certificate: trustme.LeafCert,
    upstream_ports: Sequence[int],
    prefix: str = "",
    client_ca: trustme.CA | None = None,
) -> Iterator[str]:
    """Run a proxy in front of these ports and yield its https URL."""
    program = needs(kind)
    folder.mkdir()
    files = write_certificate(certificate, folder, client_ca)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    upstreams = [f"127.0.0.1:{upstream}" for upstream in upstream_ports]
    if kind == "caddy":
        tls = f"tls {files.cert} {files.key}"
        if files.client_ca is not None:
            tls += f" {{\n client_auth {{\n mode require_and_verify\n trusted_ca_cert_file {files.client_ca}\n }}\n }}"
        process = LoggedProcess(
            [program, "run", "--adapter", "caddyfile", "--config", DEPLOY / "Caddyfile"],
            DISTRANS_SITE=f"https://localhost:{port}",
            DISTRANS_UPSTREAMS=" ".join(upstreams),
            DISTRANS_PREFIX=prefix,
            DISTRANS_TLS=tls,
            HOME=str(folder),
            XDG_DATA_HOME=str(folder),
            XDG_CONFIG_HOME=str(folder),
        )
        ready = "serving initial configuration"
    else:
        (folder / "nginx.conf").write_text(_nginx(folder, port, upstreams, prefix, files))
        process = LoggedProcess([program, "-e", "stderr", "-p", folder, "-c", folder / "nginx.conf"])
        ready = "start worker process"
    try:
        process.wait_for_line(ready)
        yield f"https://localhost:{port}{prefix}"
    finally:
        process.stop()


def _nginx(folder: Path, port: int, upstreams: list[str], prefix: str, files: Tls) -> str:
    site = (DEPLOY / "nginx.conf").read_text()
    servers = "".join(f"server {upstream} max_fails=1 fail_timeout=5s; " for upstream in upstreams)
    changes = {
        "server 127.0.0.1:8400 max_fails=1 fail_timeout=5s;": servers,
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "/etc/distrans/tls/cert.pem": str(files.cert),
        "/etc/distrans/tls/key.pem": str(files.key),
        "location / {": f"location {prefix}/ {{",
    }
    if files.client_ca is not None:
        changes |= {
            "# ssl_client_certificate /etc/distrans/tls/clients.pem;": f"ssl_client_certificate {files.client_ca};",
            "# ssl_verify_client on;": "ssl_verify_client on;",
        }
    for old, new in changes.items():
        assert site.count(old) == 1, old
        site = site.replace(old, new)
    user = "user root;" if os.geteuid() == 0 else ""  # workers must be able to read the test's folder
    paths = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        f"daemon off; {user} worker_processes 1; pid {folder}/pid; error_log stderr notice;\n"
        f"events {{}}\nhttp {{ access_log off; {paths}\n{site}\n}}\n"
    )
