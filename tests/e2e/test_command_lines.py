import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.launcher import warm_programs
from typer.testing import CliRunner

from lab.__main__ import app as lab
from shared import __version__

INSTALLED = Path(sys.executable).parent
PROGRAMS = ["distrans-server", "distrans-agent", "distrans-lab"]


def run(*command: str, folder: Path, programs: Path = INSTALLED) -> subprocess.CompletedProcess[str]:
    """Run one of the programs outside of the repository."""
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
    environment["OMP_NUM_THREADS"] = "1"  # on a busy machine several threads wait for each other for minutes
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [programs / command[0], *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def error_of(*command: str, folder: Path) -> str:
    """Run a command that must fail without a traceback; return its stderr."""
    result = run(*command, folder=folder)
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def table_rows(output: str) -> list[list[str]]:
    """Return the cells of a table's body."""
    return [
        [cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line.startswith("│")
    ]


class TestEveryProgram:
    @pytest.mark.parametrize("program", PROGRAMS)
    def test_prints_the_version(self, program: str, tmp_path: Path) -> None:
        result = run(program, "--version", folder=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (0, f"distrans {__version__}\n", "")

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_prints_help(self, program: str, tmp_path: Path) -> None:
        result = run(program, "--help", folder=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        assert f"Usage: {program}" in result.stdout
        assert "--version" in result.stdout

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_an_unknown_command_is_refused(self, program: str, tmp_path: Path) -> None:
        assert "No such command 'dance'" in error_of(program, "dance", folder=tmp_path)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_an_unknown_option_is_refused(self, program: str, tmp_path: Path) -> None:
        assert "No such option" in error_of(program, "--dance", folder=tmp_path)

    @pytest.mark.parametrize("module", ["server", "client_agent", "lab"])
    def test_h_is_short_for_help(self, module: str) -> None:
        command = [sys.executable, "-m", module]
        short, long = (subprocess.run([*command, flag], capture_output=True, check=True) for flag in ("-h", "--help"))
        assert short.stdout == long.stdout

    @pytest.mark.parametrize("module", ["server", "client_agent", "lab"])
    def test_help_does_not_load_torch(self, module: str) -> None:
        code = f"import sys, {module}.__main__; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    @pytest.mark.parametrize("module", ["server", "client_agent", "lab"])
    def test_every_program_runs_as_a_module(self, module: str, tmp_path: Path) -> None:
        command = [sys.executable, "-m", module, "--version"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (0, f"distrans {__version__}\n")


class TestDemo:
    def test_demo_ends_with_a_table_and_a_prediction(self, tmp_path: Path) -> None:
        """Two sites and two rounds; its child processes are forked, so they need not load torch."""
        options = ("--rounds", "2", "--clients", "2", "--dh", "1", "--images", "60")
        with warm_programs() as programs:
            result = run("distrans-lab", "demo", *options, folder=tmp_path, programs=programs)
        assert (result.returncode, result.stderr) == (0, "")
        assert "2 sites, 10 classes, DH 100%; distrans on lenet; everything is in demo-run\n" in result.stdout
        figures = r"training loss (\d\.\d{3}), training accuracy \d+\.\d%, \d+ images/s, 0\.1 MB uploaded"
        rounds = re.findall(rf"^round (\d) of 2: {figures}$", result.stdout, re.MULTILINE)
        assert [number for number, _ in rounds] == ["1", "2"]
        assert float(rounds[1][1]) < float(rounds[0][1])
        rows = re.findall(r"^(site-\d+) +(\d+) +(plain|inverted) +60((?: +\d+\.\d%){3})  (.+)$", result.stdout, re.M)
        assert [(row[0], row[2]) for row in rows] == [("site-001", "plain"), ("site-002", "inverted")]
        assert sorted(rows[0][1] + rows[1][1]) == list("0123456789")
        verdict = r"(pays off|unclear|better alone)( [+−]\d+\.\d)? +[a-z]\S+( \+prior)?"
        assert all(re.fullmatch(verdict, row[4].rstrip()) for row in rows)  # no asterisk: the agents have finished
        assert re.search(r"^Joining pays off at (none|\d) of 2 sites.*\.$", result.stdout, re.MULTILINE)
        call, text = re.search(r"^\$ (curl .*)\n(\{.*\})$", result.stdout, re.MULTILINE).groups()  # type: ignore[union-attr]
        answer = json.loads(text)
        assert (answer["model"]["federation"], answer["model"]["round"]) == ("demo", 2)
        assert answer["predictions"][0]["label"] in "0123456789"
        image = re.search(r"--data-binary @(\S+) ", call)
        assert image is not None
        assert (tmp_path / image[1]).is_file()
        assert [path.name for path in tmp_path.iterdir()] == ["demo-run"]
        ports = set(re.findall(r"http://127\.0\.0\.1:(\d+)", result.stdout))
        assert len(ports) == 2  # the coordinator's, and the one of the site that predicted
        for port in ports:  # its processes have ended
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(port)), timeout=5)

    @pytest.mark.parametrize(
        "option", [("--clients", "0"), ("--rounds", "0"), ("--dh", "2"), ("--images", "-1"), ("--shift", "up")]
    )
    def test_options_out_of_range_are_refused(self, option: tuple[str, str]) -> None:
        result = CliRunner().invoke(lab, ["demo", *option])
        assert (result.exit_code, result.stdout) == (2, "")
        assert option[0] in result.stderr


class TestBenchTrain:
    def test_bench_train_prints_a_table(self) -> None:
        arguments = ["bench", "train", "lenet", "--repeats", "1", "--seconds", "0", "--images", "32", "--threads", "1"]
        result = CliRunner(env={"COLUMNS": "160"}).invoke(lab, arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "Local training on cpu, 3×64×64, batch 32" in result.stdout
        ((name, threads, passes, written, joint, *ratios),) = table_rows(result.stdout)
        assert (name, threads, passes) == ("lenet", "1", "1")
        assert int(written) > 0
        assert int(joint) > 0
        assert len(ratios) == 2
        assert all(re.fullmatch(r"\d+\.\d\d×", ratio) for ratio in ratios)
