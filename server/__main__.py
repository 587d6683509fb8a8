"""`distrans-server`. Heavy imports stand inside the commands, so that `--help` answers at once."""

import atexit
import csv
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from shared.command_line import VersionOption, run
from shared.problems import DistransError

if TYPE_CHECKING:
    from server.service.context import Actor, Context
    from server.store.session import Database
    from shared.schemas import FederationView

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
db_app = typer.Typer(no_args_is_help=True, help="The database's schema.")
federation_app = typer.Typer(no_args_is_help=True, help="Federations.")
client_app = typer.Typer(no_args_is_help=True, help="The clients of a federation.")
audit_app = typer.Typer(no_args_is_help=True, help="Who did what, when, from where.")
app.add_typer(db_app, name="db")
app.add_typer(federation_app, name="federation")
app.add_typer(client_app, name="client")
app.add_typer(audit_app, name="audit")
out = Console(soft_wrap=True, markup=False, emoji=False)  # sites choose some of the texts; they are no markup

DataDir = Annotated[
    Path, typer.Option("--data-dir", envvar="DISTRANS_DATA_DIR", help="Embedded database and admin token.")
]
Db = Annotated[
    str | None,
    typer.Option("--db", envvar="DISTRANS_DB", help="sqlite:///FILE or postgresql://… [default: in the data folder]"),
]
Federation = Annotated[str, typer.Argument(help="The federation's name.")]
Client = Annotated[str, typer.Argument(help="The client's name or id.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_DATA = Path("distrans-data")


@app.callback()
def program(version: VersionOption = False) -> None:
    """The coordinator of DisTrans federations."""


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8400,
    data_dir: DataDir = _DATA,
    db: Db = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes.")] = 1,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file: clients must show a certificate that one of these has signed.")
    ] = None,
    keep_round_uploads: Annotated[
        int, typer.Option(min=0, help="Finished rounds of each federation whose uploads are kept.")
    ] = 1,
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
    from server.service.housekeeping import Retention
    from server.settings import (
        Settings,
        check_networks,
        check_root_path,
        find_admin_token,
        from_environment,
        secret,
        split_list,
    )
    from server.store.schema import current_version, require_current, upgrade
    from server.tls import Tls

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
    database = _database(db, data_dir)
    if database.is_sqlite and current_version(database) is None:
        upgrade(database)  # a new embedded coordinator; an existing database is never changed without being asked
    require_current(database)
    if database.objects is not None:
        database.objects.check()
    database.close()
    token, new_file = find_admin_token(data_dir, create=True)
    if new_file is not None:
        out.print(f"A new admin token is in {new_file}, readable by you alone.")
    settings = Settings(
        db_url=_url(db, data_dir),
        admin_token=token,
        scrape_token=secret("DISTRANS_SCRAPE_TOKEN"),
        retention=Retention(keep_round_uploads=keep_round_uploads),
        **more,
    )
    tls = Tls(tls_cert, tls_key, tls_client_ca) if tls_cert and tls_key else None
    serve_forever(settings, Listen(host, port, workers, tls, log_format, log_level))


@db_app.command("upgrade")
def db_upgrade(data_dir: DataDir = _DATA, db: Db = None) -> None:
    """Bring the database's schema to this program's version."""
    from server.store.schema import upgrade

    before, after = upgrade(_database(db, data_dir))
    out.print(f"The schema is at {after} already." if before == after else f"Schema: {before or 'empty'} → {after}.")


@db_app.command("backup")
def db_backup(
    file: Annotated[Path, typer.Argument(help="A new file.")], data_dir: DataDir = _DATA, db: Db = None
) -> None:
    """Copy the embedded database to a file while the coordinator runs."""
    from server.store.backup import backup

    out.print(f"Wrote {file}, {backup(_database(db, data_dir), file)} bytes.")


@federation_app.command("create")
def federation_create(
    plan: Annotated[Path | None, typer.Argument(help="The plan, a TOML file.")] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a commented plan and exit.")] = False,
    weights: Annotated[Path | None, typer.Option(help="Initial weights, for model.weights = 'file'.")] = None,
    data_dir: DataDir = _DATA,
    db: Db = None,
) -> None:
    """Create a federation from a plan."""
    from server.example_plan import EXAMPLE_PLAN
    from shared.plan import parse_plan

    if example:
        typer.echo(EXAMPLE_PLAN, nl=False)
        return
    if plan is None:
        raise DistransError("Name a plan file.", next_step="--example prints one to start from.")
    try:
        parsed = parse_plan(plan.read_text(encoding="utf-8"))
    except OSError as error:
        raise DistransError(f"{plan} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DistransError(f"{plan} is not a text in UTF-8.") from error
    from server.service import federations

    federations.create(_context(db, data_dir), _operator(), parsed, weights)
    out.print(f"Federation {parsed.name} created. Next: distrans-server invite {parsed.name}")


@federation_app.command("list")
def federation_list(data_dir: DataDir = _DATA, db: Db = None, as_json: Json = False) -> None:
    """All federations."""
    from server.service import federations

    views = federations.list_all(_context(db, data_dir))
    if as_json:
        typer.echo(json.dumps([view.model_dump() for view in views]))
        return
    table = Table("federation", "state", "rounds", "clients", "DH", "best accuracy", "what now")
    for view in views:
        table.add_row(
            view.name,
            view.state,
            f"{view.rounds_done} of {view.rounds_total}",
            str(view.clients),
            "–" if view.dh is None else f"{view.dh:.0%}",
            "–" if view.best_accuracy is None else f"{view.best_accuracy:.1%}",
            view.waiting_for or view.reason,
        )
    out.print(table)


@federation_app.command("show")
def federation_show(name: Federation, data_dir: DataDir = _DATA, db: Db = None, as_json: Json = False) -> None:
    """One federation, with its clients and its latest rounds."""
    from server.service import enrolment, federations, reports

    ctx = _context(db, data_dir)
    view = federations.show(ctx, name)
    if as_json:
        typer.echo(view.model_dump_json(indent=2))
        return
    _print_view(view)
    clients = Table("client", "state", "images", "device", "last seen")
    for client in enrolment.clients_of(ctx, name):
        silent_s = max(0, ctx.clock() - client.last_seen_at)
        clients.add_row(
            client.name, client.state, str(sum(client.class_counts.values())), client.device, f"{silent_s:.0f} s ago"
        )
    out.print(clients)
    rounds = Table("round", "state", "updates", "accuracy of its model", "reason")
    last = view.round.number if view.round else view.latest_model
    for round_ in reports.rounds(ctx, name, None, max(0, last - 10), 20):
        accuracy = round_.evaluation.accuracy if round_.evaluation else None
        rounds.add_row(
            str(round_.number),
            round_.state,
            f"{round_.updates} of {round_.participants}",
            "–" if accuracy is None else f"{accuracy:.1%}",
            round_.waiting_for or round_.reason,
        )
    out.print(rounds)


def _change(action: str, name: str, data_dir: Path, db: str | None) -> None:
    from server.service import federations

    ctx = _context(db, data_dir)
    getattr(federations, action)(ctx, _operator(), name)
    _print_view(federations.show(ctx, name))


@federation_app.command("start")
def federation_start(name: Federation, data_dir: DataDir = _DATA, db: Db = None) -> None:
    """Begin, as soon as enough sites have joined."""
    _change("start", name, data_dir, db)


@federation_app.command("pause")
def federation_pause(name: Federation, data_dir: DataDir = _DATA, db: Db = None) -> None:
    """Hold; no deadline passes meanwhile."""
    _change("pause", name, data_dir, db)


@federation_app.command("resume")
def federation_resume(name: Federation, data_dir: DataDir = _DATA, db: Db = None) -> None:
    """Go on after a pause."""
    _change("resume", name, data_dir, db)


@federation_app.command("cancel")
def federation_cancel(name: Federation, data_dir: DataDir = _DATA, db: Db = None) -> None:
    """End for good; the models stay."""
    _change("cancel", name, data_dir, db)


@federation_app.command("export")
def federation_export(
    name: Federation,
    target: Annotated[Path, typer.Argument(help="A new folder, or a file ending in .zip.")],
    data_dir: DataDir = _DATA,
    db: Db = None,
) -> None:
    """Write model, plan, history and offsets into a folder or a zip."""
    from server.service.archive import export

    out.print(f"Wrote {export(_context(db, data_dir), _operator(), name, target)}.")


@federation_app.command("import")
def federation_import(
    source: Annotated[Path, typer.Argument(help="What `export` wrote.")],
    name: Annotated[str | None, typer.Option(help="Another name than the exported one.")] = None,
    data_dir: DataDir = _DATA,
    db: Db = None,
) -> None:
    """Bring an exported federation back; sites join it again with new invites."""
    from server.service.archive import restore

    ctx = _context(db, data_dir)
    restored = restore(ctx, _operator(), source, name)
    from server.service import federations

    _print_view(federations.show(ctx, restored))


@app.command()
def invite(
    name: Federation,
    hours: Annotated[float, typer.Option(min=0.01, max=8760, help="How long it may wait to be used.")] = 168,
    data_dir: DataDir = _DATA,
    db: Db = None,
) -> None:
    """Print a one-use invite token for a site."""
    from server.service.enrolment import invite as make_invite

    typer.echo(make_invite(_context(db, data_dir), _operator(), name, hours * 3600).token)


@client_app.command("list")
def client_list(name: Federation, data_dir: DataDir = _DATA, db: Db = None, as_json: Json = False) -> None:
    """The clients of a federation."""
    from server.service.enrolment import clients_of

    views = clients_of(_context(db, data_dir), name)
    if as_json:
        typer.echo(json.dumps([view.model_dump() for view in views]))
        return
    table = Table("client", "id", "state", "images", "classes", "device", "agent")
    for view in views:
        held = [label for label, count in view.class_counts.items() if count]
        images = str(sum(view.class_counts.values()))
        table.add_row(view.name, view.id, view.state, images, ", ".join(held[:10]), view.device, view.agent_version)
    out.print(table)


@client_app.command("revoke")
def client_revoke(name: Federation, client: Client, data_dir: DataDir = _DATA, db: Db = None) -> None:
    """End a client's access; rounds no longer wait for it."""
    from server.service.enrolment import revoke

    revoke(_context(db, data_dir), _operator(), name, client)
    out.print(f"Client {client} of {name} is revoked.")


@client_app.command("rotate")
def client_rotate(name: Federation, client: Client, data_dir: DataDir = _DATA, db: Db = None) -> None:
    """Print a new token for a client; the old one ends at once."""
    from server.service.enrolment import rotate

    typer.echo(rotate(_context(db, data_dir), _operator(), name, client).token)


@audit_app.command("list")
def audit_list(
    federation: Annotated[str | None, typer.Option(help="Only this federation's.")] = None,
    data_dir: DataDir = _DATA,
    db: Db = None,
) -> None:
    """The audit log."""
    from datetime import UTC, datetime

    from server.service.audit import all_entries

    table = Table("time (UTC)", "who", "what", "federation", "from", "detail")
    for entry in all_entries(_context(db, data_dir), federation):
        at = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(at, entry.actor, entry.action, entry.federation, entry.address, entry.detail)
    out.print(table)


@audit_app.command("export")
def audit_export(
    file: Annotated[Path, typer.Argument(help="A .csv file, or .jsonl.")], data_dir: DataDir = _DATA, db: Db = None
) -> None:
    """Write the whole audit log to a file."""
    from server.service.audit import all_entries
    from shared.schemas import AuditView

    entries = all_entries(_context(db, data_dir))
    try:
        with file.open("w", newline="", encoding="utf-8") as handle:
            if file.suffix == ".jsonl":
                handle.writelines(entry.model_dump_json() + "\n" for entry in entries)
            else:
                writer = csv.DictWriter(handle, list(AuditView.model_fields))
                writer.writeheader()
                writer.writerows(entry.model_dump() for entry in entries)
    except OSError as error:
        raise DistransError(f"{file} cannot be written: {error.strerror}.") from error
    out.print(f"Wrote {file}.")


def _print_view(view: "FederationView") -> None:
    accuracy = "" if view.best_accuracy is None else f", best accuracy {view.best_accuracy:.1%}"
    heterogeneity = "" if view.dh is None else f", DH {view.dh:.0%}"
    out.print(
        f"{view.name}: {view.state}, {view.rounds_done} of {view.rounds_total} rounds, {view.clients} clients"
        f"{heterogeneity}{accuracy}",
        highlight=False,
    )
    for line in (view.waiting_for, view.reason):
        if line:
            out.print(f"  {line}", highlight=False)


def _url(db: str | None, data_dir: Path) -> str:
    from server.settings import default_db_url, with_password

    return with_password(db) if db else default_db_url(data_dir)


def _database(db: str | None, data_dir: Path) -> "Database":
    from server.store.session import Database

    database = Database(_url(db, data_dir), os.environ.get("DISTRANS_BLOBS") or None)
    atexit.register(database.close)  # SQLite puts its -wal file away when the last connection closes
    return database


def _context(db: str | None, data_dir: Path) -> "Context":
    from server.service.context import Context
    from server.store.schema import require_current

    database = _database(db, data_dir)
    require_current(database)
    return Context(database)


def _operator() -> "Actor":
    import getpass

    from server.service.context import Actor

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return Actor(f"operator:{user}", "command line")


def main() -> None:
    """Entry point of the console script."""
    run(app)


if __name__ == "__main__":
    main()
