"""`distrans-server serve`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from server.commands.arguments import DATA, DataDir, Db, NoServer
from server.commands.output import out
from server.commands.place import open_database, upgrade_command, url_of
from shared.command_line import ended_by_interrupts
from shared.problems import DistransError


@ended_by_interrupts()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8400,
    data_dir: DataDir = DATA,
    db: Db = None,
    _server: NoServer = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of processes that answer requests.")] = 1,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file: clients must show a certificate that one of these has signed.")
    ] = None,
    keep_round_uploads: Annotated[
        int, typer.Option(min=0, help="Finished rounds of each federation whose uploads are kept.")
    ] = 1,
    keep_models: Annotated[
        int,
        typer.Option(
            min=0, help="Newest models of each federation that are kept, besides the first and the best (0 = all)."
        ),
    ] = 0,
    root_path: Annotated[
        str, typer.Option(envvar="DISTRANS_ROOT_PATH", help="Prefix that a proxy serves it under, like /federated.")
    ] = "",
    trusted_proxies: Annotated[
        str, typer.Option(envvar="DISTRANS_TRUSTED_PROXIES", help="Addresses or networks of proxies, with commas.")
    ] = "",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the coordinator."""
    from server.serve import Listen, configure_logging
    from server.serve import serve as serve_forever
    from server.service.cleaning import Retention
    from server.settings import (
        Settings,
        check_networks,
        check_root_path,
        find_admin_token,
        from_environment,
        split_list,
    )
    from server.store.ownership import claim
    from server.store.schema import current_version, require_current, upgrade
    from shared.environment import secret
    from shared.http.tls import Tls

    if (tls_cert is None) != (tls_key is None):
        raise DistransError("--tls-cert and --tls-key go together.")
    if tls_client_ca is not None and tls_cert is None:
        raise DistransError("--tls-client-ca needs --tls-cert and --tls-key.")
    if log_format not in ("text", "json") or log_level not in ("debug", "info", "warning", "error"):
        raise DistransError("--log-format is text or json; --log-level is debug, info, warning or error.")
    proxies = split_list(trusted_proxies)
    check_networks(proxies, "--trusted-proxies")
    more = from_environment(os.environ) | {"trusted_proxies": proxies, "root_path": check_root_path(root_path)}
    configure_logging(log_format, log_level)
    database = open_database(db, data_dir, create=True)
    if database.is_sqlite and current_version(database) is None:
        upgrade(database)  # a new embedded coordinator; an existing database is never changed without being asked
    require_current(database, upgrade_command(db, data_dir))
    if database.objects is not None:
        database.objects.check()
        claim(database)
    database.close()
    token, new_file = find_admin_token(data_dir, create=True)
    if new_file is not None:
        out.print(f"A new admin token is in {new_file}, readable by you alone.")
    settings = Settings(
        db_url=url_of(db, data_dir),
        admin_token=token,
        scrape_token=secret("DISTRANS_SCRAPE_TOKEN"),
        retention=Retention(keep_round_uploads=keep_round_uploads, keep_models=keep_models),
        **more,
    )
    tls = Tls(tls_cert, tls_key, tls_client_ca) if tls_cert and tls_key else None
    serve_forever(settings, Listen(host, port, workers, tls, log_format, log_level))
