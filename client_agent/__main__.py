"""`distrans-agent`. Heavy imports stand inside the commands, so that `--help` answers at once."""

import json
import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shared.command_line import VersionOption, run
from shared.problems import DistransError

if TYPE_CHECKING:
    from client_agent.data import DataReport

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
out = Console(soft_wrap=True)
State = Annotated[
    Path, typer.Option("--state", envvar="DISTRANS_AGENT_STATE", help="The agent's folder: identity, offset, models.")
]
_STATE = Path("distrans-agent")


@app.callback()
def program(version: VersionOption = False) -> None:
    """The agent of a site that takes part in a DisTrans federation."""


@app.command()
def join(
    server: Annotated[str, typer.Option(help="The coordinator, https://host[:port].")],
    invite: Annotated[str, typer.Option(envvar="DISTRANS_INVITE", help="The invite token from the operator.")],
    name: Annotated[str, typer.Option(help="This site's name in the federation.")],
    data: Annotated[
        str,
        typer.Option(
            help="A folder (train/CLASS/…, test/CLASS/… or CLASS/…), .csv, .npz, sklearn:digits, "
            "torchvision:NAME:ROOT or package.module:function."
        ),
    ] = "sklearn:digits",
    state: State = _STATE,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Go on without unreadable files and unknown classes.")
    ] = False,
    ca_file: Annotated[Path | None, typer.Option(help="PEM file of the authority to trust.")] = None,
    client_cert: Annotated[Path | None, typer.Option(help="PEM file of this site's certificate.")] = None,
    client_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    allow_insecure_http: Annotated[
        bool, typer.Option("--allow-insecure-http", help="Allow http:// to another machine.")
    ] = False,
) -> None:
    """Check this site's data against the plan, and enrol."""
    from pydantic import ValidationError
    from rich.progress import Progress

    from client_agent.enrol import join_federation
    from client_agent.settings import Connection, expand
    from client_agent.state import StateFolder

    connection = Connection(
        server=server.rstrip("/"),
        ca_file=expand(ca_file),
        client_cert=expand(client_cert),
        client_key=expand(client_key),
        allow_insecure_http=allow_insecure_http,
    )
    with Progress(console=out, transient=True, disable=not out.is_terminal) as progress:
        bar = progress.add_task("checking the images", total=None)
        try:
            identity = join_federation(
                StateFolder(state),
                connection,
                invite,
                name,
                data,
                skip_bad=skip_bad,
                on_report=_print_counts,
                on_file=lambda done, total: progress.update(bar, completed=done, total=total),
            )
        except ValidationError as error:
            faults = "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in error.errors())
            raise DistransError(f"The site cannot join like this: {faults}.") from error
    out.print(
        f"Joined {identity.federation} as {name}. Credentials are in {state}, readable by you alone. "
        f"Next: distrans-agent run{'' if state == _STATE else f' --state {shlex.quote(str(state))}'}",
        highlight=False,
    )


def _print_counts(report: "DataReport") -> None:
    table = Table("class", "training images", "held-out images")
    for label, count in report.class_counts.items():
        if count or report.test_counts[label]:
            table.add_row(label, str(count), str(report.test_counts[label]))
    out.print(table)
    if report.bad:
        out.print(f"Went on without {len(report.bad)} faulty files or classes:", style="yellow")
        for line in report.bad[:10]:
            out.print(f"  {line}", markup=False, highlight=False)


@app.command("run")
def run_command(
    state: State = _STATE,
    host: Annotated[str, typer.Option(help="Address for /predict.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for /predict; 0 takes a free one.")] = 8500,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Take part in rounds, or only serve.")] = True,
    serve: Annotated[bool, typer.Option("--serve/--no-serve", help="Serve /predict.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32, bf16, or fp16 on CUDA.")] = "fp32",
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Memory format that some GPUs prefer.")
    ] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")] = False,
    train_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for training.")] = None,
    predict_threads: Annotated[int, typer.Option(min=1, help="CPU threads for /predict.")] = 1,
    cache_mb: Annotated[int, typer.Option(min=0, help="Memory for decoded images, in MB.")] = 2048,
    predict_token: Annotated[
        str | None,
        typer.Option(
            envvar="DISTRANS_PREDICT_TOKEN",
            help="Ask callers of /predict for this token; DISTRANS_PREDICT_TOKEN_FILE names a file that holds it.",
        ),
    ] = None,
    allow_open_predict: Annotated[
        bool, typer.Option("--allow-open-predict", help="Serve /predict to a network without a token.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            envvar="DISTRANS_AGENT_ALLOWED_HOSTS",
            help="Host name that callers use besides --host, such as that of a proxy. Repeatable, or with commas.",
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the certificate chain for /predict.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    allow_offset_override: Annotated[
        bool, typer.Option("--allow-offset-override", help="Allow /predict?offset=none and both.")
    ] = False,
    keep_models: Annotated[int, typer.Option(min=1, help="How many models are kept for `pin`.")] = 5,
    max_accuracy_drop: Annotated[
        float, typer.Option(min=0, max=1, help="A model that scores worse here by more is not served; 1: serve all.")
    ] = 0.1,
    local_baseline: Annotated[
        bool, typer.Option("--local-baseline", help="Also train a model on this site's data alone.")
    ] = False,
    exit_when_finished: Annotated[
        bool, typer.Option("--exit-when-finished", help="End with the federation instead of serving on.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Train whenever the coordinator asks, and serve /predict."""
    if precision not in ("fp32", "bf16", "fp16"):
        raise DistransError("--precision is fp32, bf16 or fp16.")
    if log_level not in ("debug", "info", "warning", "error"):
        raise DistransError("--log-level is debug, info, warning or error.")
    if not train and not serve:
        raise DistransError("--no-train and --no-serve together leave nothing to do.")
    if (tls_cert is None) != (tls_key is None):
        raise DistransError("--tls-cert and --tls-key go together.")
    from client_agent.run import run_agent
    from client_agent.settings import RunOptions, ServeOptions
    from client_agent.state import StateFolder
    from shared.environment import secret
    from shared.http.tls import Tls

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    for name in ("httpx", "client_agent.access"):  # a line per request: too many
        logging.getLogger(name).setLevel(logging.WARNING)
    web = ServeOptions(
        host=host,
        port=port,
        token=secret("DISTRANS_PREDICT_TOKEN") if predict_token is None else predict_token,
        tls=Tls(tls_cert, tls_key) if tls_cert and tls_key else None,
        allowed_hosts=tuple(host.strip() for text in allowed_host or [] for host in text.split(",") if host.strip()),
        allow_open_predict=allow_open_predict,
        allow_offset_override=allow_offset_override,
        threads=predict_threads,
    )
    if serve:
        web.check()  # before minutes go into looking at the data
    options = RunOptions(
        train=train,
        serve=web if serve else None,
        device=device,
        precision=precision,  # type: ignore[arg-type]  # checked above
        channels_last=channels_last,
        compile=compile_,
        train_threads=train_threads,
        cache_bytes=cache_mb * 1024 * 1024,
        keep_models=keep_models,
        max_accuracy_drop=None if max_accuracy_drop >= 1 else max_accuracy_drop,
        local_baseline=local_baseline,
        exit_when_finished=exit_when_finished,
    )
    run_agent(StateFolder(state), options, out)


@app.command()
def status(state: State = _STATE, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Who this agent is, what it serves, and whether joining paid off."""
    from client_agent.errors import StateError
    from client_agent.serving import load_served
    from client_agent.state import StateFolder
    from shared.runtime import Runtime

    folder = StateFolder(state)
    identity = folder.identity()
    rows, report = [line.row() for line in folder.history()], folder.condition()
    try:
        served = load_served(folder, identity, Runtime())[1].number
    except StateError:
        served = None
    about: dict[str, Any] = {
        "name": identity.name,
        "federation": identity.federation,
        "coordinator": identity.connection.server,
        "method": identity.plan.method.name,
        "data": identity.data,
        "kept_models": folder.bundle_numbers(),
        "serving": served,
        "pinned": folder.pinned(),
        "ended": report.ended,
        "outcome": report.outcome,
        "troubles": [trouble.model_dump() for trouble in report.troubles],
        "upload_pending": folder.pending() is not None,
        "history": rows,
    }
    if as_json:
        typer.echo(json.dumps(about, indent=2))
        return
    out.print(f"{identity.name} in federation {identity.federation} at {identity.connection.server}", highlight=False)
    if about["pinned"] is not None:
        out.print(f"/predict is pinned to model {about['pinned']}.")
    if report.ended is not None:
        out.print(f"ended: {report.ended}. {report.outcome}", style="red", markup=False, highlight=False)
    for trouble in report.troubles:
        out.print(f"{trouble.kind}: {trouble.message}", style="yellow", markup=False, highlight=False)
    table = Table(
        "model", "global + own offset", "global, no offset", "this site alone", "served", title="Accuracy here"
    )
    for row in rows:
        scores = [row["with_offset"], row["without_offset"], row["local"]]
        cells = ["–" if score is None else f"{score:.1%}" for score in scores]
        table.add_row(str(row["model"]), *cells, "yes" if row["served"] else row["reason"])
    out.print(table)


@app.command()
def predict(
    images: Annotated[list[Path], typer.Argument(help="PNG or JPEG files.")],
    state: State = _STATE,
    top_k: Annotated[int, typer.Option(min=1, help="Classes to list for each image.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Classify images with the model that /predict would serve; needs no running agent."""
    from client_agent import serving
    from client_agent.images import TRAINING_FORMATS, decode, to_tensor
    from client_agent.state import StateFolder
    from shared.runtime import Runtime

    folder = StateFolder(state)
    identity = folder.identity()
    _, model = serving.load_served(folder, identity, Runtime())
    table = Table("image", "class", "probability", "then", title=f"Model {model.number} with this site's offset")
    answers = []
    for path in images:
        try:
            tensor = to_tensor(decode(path, TRAINING_FORMATS), identity.plan.image)
        except DistransError as error:
            raise DistransError(f"{path}: {error}") from error
        values, places = model.own(tensor[None]).softmax(dim=1)[0].topk(min(top_k, len(model.classes)))
        ranked = [(model.classes[int(place)], float(value)) for value, place in zip(values, places, strict=True)]
        answers.append(
            {"image": str(path), "top_k": [{"label": label, "probability": value} for label, value in ranked]}
        )
        rest = ", ".join(f"{label} {value:.1%}" for label, value in ranked[1:])
        table.add_row(str(path), ranked[0][0], f"{ranked[0][1]:.1%}", rest)
    if as_json:
        typer.echo(json.dumps({"model": model.number, "predictions": answers}, indent=2))
    else:
        out.print(table)


@app.command()
def pin(
    number: Annotated[int, typer.Argument(help="A model that is kept; see status.")], state: State = _STATE
) -> None:
    """Make /predict answer with an older model, until `unpin`; a running agent follows at once."""
    from client_agent.state import StateFolder

    StateFolder(state).pin(number)
    out.print(f"/predict is pinned to model {number}.")


@app.command()
def unpin(state: State = _STATE) -> None:
    """Let /predict follow the newest model again."""
    from client_agent.state import StateFolder

    StateFolder(state).pin(None)
    out.print("/predict follows the newest model.")


@app.command()
def export(
    target: Annotated[Path, typer.Argument(help="A file ending in .safetensors or .pt2 (torch.export).")],
    state: State = _STATE,
    number: Annotated[
        int | None, typer.Option("--round", help="Another model than the one that /predict serves.")
    ] = None,
) -> None:
    """Write model and offset as one file."""
    from client_agent.export import export_program, export_safetensors
    from client_agent.serving import load_served
    from client_agent.state import StateFolder
    from shared.runtime import Runtime

    writers = {".safetensors": export_safetensors, ".pt2": export_program}
    if target.suffix not in writers:
        raise DistransError(f"{target} must end in .safetensors or .pt2.")
    folder = StateFolder(state)
    identity = folder.identity()
    bundle = load_served(folder, identity, Runtime())[0] if number is None else folder.load_bundle(number)
    writers[target.suffix](identity, bundle, target)
    out.print(f"Wrote model {bundle.number} with this site's offset to {target}.")


def main() -> None:
    """Entry point of the console script."""
    run(app)


if __name__ == "__main__":
    main()
