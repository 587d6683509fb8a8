"""Options of `distrans-agent run` that cannot work, and what becomes of those that can."""

from pathlib import Path

import pytest
from support.digit_sites import new_state
from typer.testing import CliRunner

from client_agent import process
from client_agent.__main__ import app, main
from client_agent.settings import RunOptions, ServedPrior
from client_agent.state.folder import StateFolder


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return new_state(tmp_path / "north")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """Collects the options of agents instead of running them."""
    found: list[RunOptions] = []
    monkeypatch.setattr(process, "run_agent", lambda _state, options, _console: found.append(options))
    return found


def run(state: StateFolder, *options: str) -> None:
    result = CliRunner().invoke(app, ["run", "--state", str(state.path), *options])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--adapt", "tail"), "--adapt 'tail' is not known. Use whole, head, off."),
        (("--share-verdict", "all"), "--share-verdict 'all' is not known. Use none, counts, full."),
        (("--prior", "sight"), "--prior sight cannot be read: No such file or directory. Use site, none, or the path"),
    ],
)
def test_an_option_that_cannot_work_is_one_line(
    state: StateFolder,
    options: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["distrans-agent", "run", "--state", str(state.path), *options])
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_by_default_the_site_trains_its_own_models_and_shares_counts(
    state: StateFolder, started: list[RunOptions]
) -> None:
    run(state)
    (options,) = started
    assert (options.alone, options.adapt, options.adapt_epochs) == (True, "whole", 10)
    assert (options.prior, options.share_verdict) == (ServedPrior(), "counts")


def test_the_former_name_of_alone_still_works(state: StateFolder, started: list[RunOptions]) -> None:
    run(state, "--local-baseline")
    run(state, "--no-alone")
    assert [options.alone for options in started] == [True, False]
    assert "--local-baseline" not in CliRunner().invoke(app, ["run", "--help"]).output


def test_a_deployments_prior_is_read_from_its_file(
    state: StateFolder, started: list[RunOptions], tmp_path: Path
) -> None:
    file = tmp_path / "screening.csv"
    file.write_text("class,frequency\n0,999\n1,1\n")
    run(state, "--prior", str(file), "--only-own-classes")
    run(state, "--prior", "none")
    assert [options.prior for options in started] == [
        ServedPrior(kind="deployment", frequencies={"0": 999.0, "1": 1.0}, only_own_classes=True),
        ServedPrior(kind="none"),
    ]
