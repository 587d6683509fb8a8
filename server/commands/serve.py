"""`distrans-server serve`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from server.commands.options import DATA, DataDir, Db, without_server
from server.commands.output import out
from server.commands.target import database_url, open_database, upgrade_command
from shared.contract.errors import DistransError
from shared.system.command_line import ended_by_interrupts, examples

EXAMPLES = examples(
    "distrans-server serve",
    "distrans-server serve --host 0.0.0.0 --tls-cert chain.pem --tls-key key.pem",
    "distrans-server serve --db postgresql://distrans@db/distrans --workers 4",
)


@without_server
@ended_by_interrupts()
def serve(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port to listen on (0 = any free port).")
    ] = 8400,
    data_dir: DataDir = DATA,
    db: Db = None,
    workers: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Processes that handle requests.")] = 1,
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM file of the certificate chain.", show_default="plain HTTP"),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file of the certificate's key.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Require client certificates signed by an authority in this PEM file."),
    ] = None,
    keep_round_uploads: Annotated[
        int, typer.Option(min=0, metavar="ROUNDS", help="Finished rounds per federation whose uploads are kept.")
    ] = 1,
    keep_models: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Newest models to keep per federation, besides the first and the best (0 = all)."
        ),
    ] = 0,
    root_path: Annotated[
        str,
        typer.Option(
            envvar="DISTRANS_ROOT_PATH",
            metavar="PATH",
            help="Path prefix under which a reverse proxy serves the coordinator, such as /federated.",
            show_default="none",
        ),
    ] = "",
    trusted_proxies: Annotated[
        str,
        typer.Option(
            envvar="DISTRANS_TRUSTED_PROXIES",
            metavar="NETWORKS",
            help="Addresses or networks of trusted reverse proxies, separated by commas.",
            show_default="none",
        ),
    ] = "",
    log_format: Annotated[str, typer.Option(metavar="text|json", help="Format of log lines.")] = "text",
    log_level: Annotated[
        str, typer.Option(metavar="debug|info|warning|error", help="Lowest level of messages to log.")
    ] = "info",
) -> None:
    """Run the coordinator until it is interrupted."""
    from server.http.serve import ListenOptions, configure_logging, open_socket
    from server.http.serve import serve as serve_forever
    from server.service.retention import Retention
    from server.service.settings import (
        Settings,
        check_networks,
        check_root_path,
        check_viewer_token,
        find_admin_token,
        from_environment,
        split_list,
    )
    from shared.http.server_tls import Tls
    from shared.system.secrets import secret

    if (tls_cert is None) != (tls_key is None):
        raise DistransError("--tls-cert and --tls-key must be used together.")
    if tls_client_ca is not None and tls_cert is None:
        raise DistransError("--tls-client-ca needs --tls-cert and --tls-key.")
    if log_format not in ("text", "json"):
        raise DistransError(f"--log-format is {log_format!r}; it must be text or json.")
    if log_level not in ("debug", "info", "warning", "error"):
        raise DistransError(f"--log-level is {log_level!r}; it must be debug, info, warning or error.")
    proxies = split_list(trusted_proxies)
    check_networks(proxies, "--trusted-proxies")
    more = from_environment(os.environ) | {"trusted_proxies": proxies, "root_path": check_root_path(root_path)}
    configure_logging(log_format, log_level)
    tls = Tls(tls_cert, tls_key, tls_client_ca) if tls_cert and tls_key else None
    listen = ListenOptions(host, port, workers, tls, log_format, log_level)
    with open_socket(listen) as listening:  # first, so that a used port leaves no data folder behind
        _prepare_database(db, data_dir)
        token, new_file = find_admin_token(data_dir, create=True)
        if new_file is not None:
            out.print(f"Created an admin token in {new_file}, readable by you only.")
        settings = Settings(
            db_url=database_url(db, data_dir),
            admin_token=token,
            scrape_token=secret("DISTRANS_SCRAPE_TOKEN"),
            viewer_token=check_viewer_token(secret("DISTRANS_VIEWER_TOKEN"), token),
            retention=Retention(keep_round_uploads=keep_round_uploads, keep_models=keep_models),
            **more,
        )
        serve_forever(settings, listen, listening)


def _prepare_database(db: str | None, data_dir: Path) -> None:
    """Create the embedded database if there is none, and raise if the database cannot be used."""
    from server.store.ownership import claim
    from server.store.schema import current_version, require_current, upgrade

    database = open_database(db, data_dir, create=True)
    if database.is_sqlite and current_version(database) is None:
        upgrade(database)  # only a new database; existing ones are upgraded on request
    require_current(database, upgrade_command(db, data_dir))
    if database.objects is not None:
        database.objects.check()
        claim(database)
    database.close()
