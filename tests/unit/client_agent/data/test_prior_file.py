"""Files with a deployment's class frequencies."""

from pathlib import Path

import pytest

from client_agent.data.prior_file import read_prior_file
from client_agent.errors import DataError

CLASSES = ("benign", "malignant", "type 3.1")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prior.json", '{"benign": 0.97, "malignant": 3e-2}'),
        ("prior.toml", '"benign" = 0.97\nmalignant = 0.03\n'),
        ("prior.csv", "class,frequency\nbenign,0.97\nmalignant,0.03\n"),
        ("PRIOR.CSV", "\ufefffrequency,class,note\n0.97,benign,often\n0.03,malignant,rare\n"),
    ],
)
def test_every_form_gives_the_same_frequencies(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    assert read_prior_file(file, CLASSES) == {"benign": 0.97, "malignant": 0.03}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("prior.json", '{"benign": 1, "malignand": 1}', "names 'malignand', which is not in the plan; did you mean"),
        ("prior.json", '{"benign": -1}', "gives 'benign' the frequency '-1'. Use a number from 0"),
        ("prior.json", '{"benign": NaN}', "gives 'benign' the frequency 'nan'"),
        ("prior.json", '{"benign": true}', "gives 'benign' the frequency 'True'"),
        ("prior.json", '{"benign": 1e999}', "gives 'benign' the frequency 'inf'"),
        ("prior.json", '{"benign": {"a": 1}}', "gives 'benign' the frequency"),
        ("prior.json", '{"benign": 0}', "has no class with a frequency above 0"),
        ("prior.json", '{"benign": 1, "benign": 2}', "it names a class twice"),
        ("prior.json", "[1]", "it does not hold an object"),
        ("prior.json", "[" * 100_000, "cannot be read"),
        ("prior.json", "{", "cannot be read"),
        ("prior.toml", "benign", "cannot be read"),
        ("prior.csv", "benign,0.97\n", "no columns class and frequency"),
        ("prior.csv", "class,frequency\nbenign\n", "gives 'benign' the frequency 'None'"),
        ("prior.csv", "", "no columns class and frequency"),
        ("prior.txt", "benign 1", "files ending in '.txt' are not supported. Use .json"),
    ],
)
def test_an_unusable_file_is_explained(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        read_prior_file(tmp_path / name, CLASSES)
    assert words in str(caught.value)


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read: No such file or directory\. Use site, none, or the path"):
        read_prior_file(tmp_path / "sight", CLASSES)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "prior.json").open("wb") as handle:
        handle.truncate(10**9)
    with pytest.raises(DataError, match="more than 16777216 bytes"):
        read_prior_file(tmp_path / "prior.json", CLASSES)
