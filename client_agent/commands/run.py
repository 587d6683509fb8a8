"""`distrans-agent run`."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from client_agent.commands.options import STATE, State, find_secret
from client_agent.commands.output import out
from shared.contract.errors import DistransError
from shared.system.command_line import ended_by_interrupts


@ended_by_interrupts()
def run(
    state: State = STATE,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to serve /predict on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port to serve /predict on; 0 picks a free one.")
    ] = 8500,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Take part in rounds, or only serve.")] = True,
    serve: Annotated[bool, typer.Option("--serve/--no-serve", help="Serve /predict, or only train.")] = True,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Device for training and predictions: auto, cpu, cuda, cuda:1, mps.")
    ] = "auto",
    precision: Annotated[
        str, typer.Option(metavar="TYPE", help="Number format of the network: fp32, bf16, or fp16 (CUDA only).")
    ] = "fp32",
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Use the channels-last memory format; faster on some GPUs.")
    ] = False,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")] = False,
    train_threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="THREADS",
            help="CPU threads for training (default: measured; at most one less than there are cores).",
        ),
    ] = None,
    predict_threads: Annotated[int, typer.Option(min=1, metavar="THREADS", help="CPU threads for /predict.")] = 1,
    cache_mb: Annotated[int, typer.Option(min=0, metavar="MB", help="Memory for decoded images, in MB.")] = 2048,
    predict_token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="Require this token from callers of /predict. Visible to other users of the machine: prefer "
            "--predict-token-file, DISTRANS_PREDICT_TOKEN or DISTRANS_PREDICT_TOKEN_FILE.",
        ),
    ] = None,
    predict_token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token for /predict; - reads standard input.")
    ] = None,
    allow_open_predict: Annotated[
        bool, typer.Option("--allow-open-predict", help="Serve /predict to the network without a token.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            envvar="DISTRANS_AGENT_ALLOWED_HOSTS",
            metavar="HOST",
            help="Host name that callers may use besides --host, such as a proxy's. Repeatable, or comma-separated.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of the certificate chain for /predict.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file of the certificate's key.")] = None,
    allow_offset_override: Annotated[
        bool, typer.Option("--allow-offset-override", help="Allow /predict?offset=none and offset=both.")
    ] = False,
    keep_models: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Number of recent models to keep for pin and export.")
    ] = 5,
    max_accuracy_drop: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Reject models that lose more accuracy here than this; 1 serves every model.",
        ),
    ] = 0.1,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone/--no-alone",
            help="Also train a model on this site's images only, to compare with and to serve if it is better. "
            "Takes up to a third of a round's training time, and idle time.",
        ),
    ] = True,
    local_baseline: Annotated[bool, typer.Option("--local-baseline", hidden=True)] = False,  # its former name
    adapt: Annotated[
        str,
        typer.Option(
            metavar="PART",
            help="Fine-tune the newest model on this site's images while the agent waits: the whole network, "
            "its head (the last layer), or off.",
        ),
    ] = "whole",
    adapt_epochs: Annotated[
        int, typer.Option(min=1, max=1000, metavar="NUMBER", help="Epochs to fine-tune for, as far as time allows.")
    ] = 10,
    prior: Annotated[
        str,
        typer.Option(
            metavar="PRIOR",
            help="Class frequencies that /predict assumes: site (this site's training images), none (the "
            "federation's), or a .json, .toml or .csv file with those where predictions are used.",
        ),
    ] = "site",
    only_own_classes: Annotated[
        bool, typer.Option("--only-own-classes", help="Never predict a class that this site has no training images of.")
    ] = False,
    share_verdict: Annotated[
        str,
        typer.Option(
            metavar="PART",
            help="What to tell the coordinator about whether joining pays off: counts (how many test images each "
            "model got right), full (also what is served), or none.",
        ),
    ] = "counts",
    exit_when_finished: Annotated[
        bool, typer.Option("--exit-when-finished", help="Exit when the federation finishes; otherwise keep serving.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="Lowest level of messages to log: debug, info, warning or error.")
    ] = "info",
) -> None:
    """Train whenever the coordinator asks, and serve /predict."""
    if precision not in ("fp32", "bf16", "fp16"):
        raise DistransError(f"Unknown precision {precision!r}.", next_step="Use --precision fp32, bf16 or fp16.")
    if log_level not in ("debug", "info", "warning", "error"):
        raise DistransError(f"Unknown log level {log_level!r}.", next_step="Use debug, info, warning or error.")
    for option, value, values in (
        ("--adapt", adapt, ("whole", "head", "off")),
        ("--share-verdict", share_verdict, ("none", "counts", "full")),
    ):
        if value not in values:
            raise DistransError(f"{option} {value!r} is not known.", next_step=f"Use {', '.join(values)}.")
    if not train and not serve:
        raise DistransError("--no-train and --no-serve together leave nothing to do.")
    if (tls_cert is None) != (tls_key is None):
        raise DistransError("--tls-cert and --tls-key must be used together.")
    secret_token = find_secret("--predict-token", predict_token, predict_token_file, "DISTRANS_PREDICT_TOKEN")
    from client_agent.data.prior_file import read_prior_file
    from client_agent.process import run_agent
    from client_agent.settings import RunOptions, ServedPrior, ServeOptions
    from client_agent.state.folder import StateFolder
    from client_agent.web.app import ACCESS_LOG
    from shared.http.server_tls import Tls

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    for name in ("httpx", ACCESS_LOG):  # they log a line per request
        logging.getLogger(name).setLevel(logging.WARNING)
    if predict_token is not None:
        logging.getLogger(__name__).warning(
            "--predict-token is visible in the process list; use --predict-token-file instead"
        )
    web = ServeOptions(
        host=host,
        port=port,
        token=secret_token,
        tls=Tls(tls_cert, tls_key) if tls_cert and tls_key else None,
        allowed_hosts=tuple(host.strip() for text in allowed_host or [] for host in text.split(",") if host.strip()),
        allow_open_predict=allow_open_predict,
        allow_offset_override=allow_offset_override,
        threads=predict_threads,
    )
    if serve:
        web.check()  # before spending minutes on opening the data
    folder = StateFolder(state)
    is_file = prior not in ("site", "none")
    frequencies = read_prior_file(Path(prior), folder.identity().plan.classes) if is_file else {}
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
        alone=alone or local_baseline,
        adapt=adapt,  # type: ignore[arg-type]  # checked above
        adapt_epochs=adapt_epochs,
        prior=ServedPrior(
            kind="deployment" if is_file else prior,
            frequencies=frequencies,
            only_own_classes=only_own_classes,
        ),
        share_verdict=share_verdict,  # type: ignore[arg-type]  # checked above
        exit_when_finished=exit_when_finished,
    )
    run_agent(folder, options, out)
