"""`distrans-agent run`."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from client_agent.commands.arguments import STATE, State
from client_agent.commands.output import out
from shared.command_line import ended_by_interrupts
from shared.problems import DistransError


@ended_by_interrupts()
def run(
    state: State = STATE,
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
            help="Ask callers of /predict for this token. Other users of the machine can see it here: prefer "
            "--predict-token-file, DISTRANS_PREDICT_TOKEN or DISTRANS_PREDICT_TOKEN_FILE."
        ),
    ] = None,
    predict_token_file: Annotated[
        Path | None, typer.Option(help="File that holds the token for /predict; - reads the standard input.")
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
    if predict_token is not None and predict_token_file is not None:
        raise DistransError("--predict-token and --predict-token-file are two ways to give the same token.")
    from client_agent.run import run_agent
    from client_agent.settings import RunOptions, ServeOptions
    from client_agent.state import StateFolder
    from shared.environment import read_secret, secret
    from shared.http.tls import Tls

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    for name in ("httpx", "client_agent.access"):  # a line per request: too many
        logging.getLogger(name).setLevel(logging.WARNING)
    if predict_token is not None:
        logging.getLogger(__name__).warning(
            "--predict-token can be seen in the list of processes; --predict-token-file cannot"
        )
    elif predict_token_file is not None:
        predict_token = read_secret(predict_token_file)
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
