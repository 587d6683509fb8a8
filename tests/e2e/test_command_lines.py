import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared import __version__

PROGRAMS = ["distrans-server", "distrans-agent", "distrans-lab"]


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one of the project's programs as a person would, away from the repository."""
    program = Path(sys.executable).parent / command[0]
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
    environment["OMP_NUM_THREADS"] = "1"  # several threads wait for each other on a busy machine, for minutes
    return subprocess.run(
        [program, *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def refuses(*command: str, folder: Path) -> str:
    """What a program says on stderr when it fails in an orderly way."""
    result = run(*command, folder=folder)
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def table_rows(output: str) -> list[list[str]]:
    """The cells of a table's body."""
    return [
        [cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line.startswith("│")
    ]


class TestEveryProgram:
    @pytest.mark.parametrize("program", PROGRAMS)
    def test_version(self, program: str, tmp_path: Path) -> None:
        result = run(program, "--version", folder=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (0, f"distrans {__version__}\n", "")

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_help(self, program: str, tmp_path: Path) -> None:
        result = run(program, "--help", folder=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        assert f"Usage: {program}" in result.stdout
        assert "--version" in result.stdout

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_unknown_command(self, program: str, tmp_path: Path) -> None:
        assert "No such command 'dance'" in refuses(program, "dance", folder=tmp_path)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_unknown_option(self, program: str, tmp_path: Path) -> None:
        assert "No such option" in refuses(program, "--dance", folder=tmp_path)

    @pytest.mark.parametrize("module", ["server", "client_agent", "lab"])
    def test_help_does_not_load_torch(self, module: str) -> None:
        code = f"import sys, {module}.__main__; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    @pytest.mark.parametrize("module", ["server", "client_agent", "lab"])
    def test_it_can_be_run_as_a_module(self, module: str, tmp_path: Path) -> None:
        command = [sys.executable, "-m", module, "--version"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (0, f"distrans {__version__}\n")


class TestDemo:
    def test_it_ends_with_the_table_and_a_prediction(self, tmp_path: Path) -> None:
        """Two sites, so that few processes have to start."""
        result = run("distrans-lab", "demo", "--rounds", "2", "--clients", "2", "--dh", "1", folder=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("2 sites, DH 100%, 10 classes; everything is in ")
        rounds = re.findall(r"^round (\d) of 2 done, mean training loss (\d+\.\d+)$", result.stdout, re.MULTILINE)
        assert [number for number, _ in rounds] == ["1", "2"]
        assert float(rounds[1][1]) < float(rounds[0][1])
        sites = table_rows(result.stdout)
        assert [row[0] for row in sites] == ["site-001", "site-002"]
        assert sorted(sites[0][1].split() + sites[1][1].split()) == list("0123456789")
        assert all(int(row[2]) > 0 for row in sites)
        assert all(re.fullmatch(r"\d+\.\d%", cell) for row in sites for cell in row[3:])
        assert {len(row) for row in sites} == {7}
        answer = json.loads(result.stdout[result.stdout.index("\n{") :])
        assert (answer["model"]["federation"], answer["model"]["round"]) == ("demo", 2)
        assert answer["predictions"][0]["label"] in "0123456789"
        assert [path.name for path in tmp_path.iterdir()] == ["demo-run"]
        ports = set(re.findall(r"http://127\.0\.0\.1:(\d+)", result.stdout))
        assert len(ports) == 2  # the coordinator's and that of the site that was asked
        for port in ports:  # the processes have ended with the program
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(port)), timeout=5)

    def test_a_number_of_sites_that_does_not_fit(self, tmp_path: Path) -> None:
        assert refuses("distrans-lab", "demo", "--clients", "3", folder=tmp_path) == (
            "error: 3 clients with 10 classes cannot have DH 60%. They can have 0%.\n"
        )

    @pytest.mark.parametrize("option", [("--clients", "0"), ("--rounds", "0"), ("--dh", "2"), ("--seed", "-1")])
    def test_numbers_out_of_range(self, option: tuple[str, str], tmp_path: Path) -> None:
        assert option[0] in refuses("distrans-lab", "demo", *option, folder=tmp_path)


class TestBenchTrain:
    def test_it_prints_its_table(self, tmp_path: Path) -> None:
        result = run("distrans-lab", "bench", "train", "lenet", "--repeats", "1", "--seconds", "0", folder=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
        assert "Local training, 3×64×64, batch 32, on cpu" in result.stdout
        ((name, speed, joint, alternating),) = table_rows(result.stdout)
        assert name == "lenet"
        assert int(speed) > 0
        assert all(re.fullmatch(r"\d+\.\d\d×", ratio) for ratio in (joint, alternating))
