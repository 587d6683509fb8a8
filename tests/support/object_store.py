"""Places for tensors outside the database: an S3-compatible store inside the test process, and a folder."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

BUCKET = "tensors"


@pytest.fixture(scope="session")
def object_server() -> Iterator[str]:
    """Run moto's server for the whole session and return its URL."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    urlopen(Request(f"{url}/{BUCKET}", method="PUT")).close()  # noqa: S310 - our own server
    yield url
    server.stop()


@pytest.fixture
def bucket(object_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of an empty prefix, in the form DISTRANS_BLOBS expects."""
    for name, value in {
        "AWS_ENDPOINT_URL": object_server,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "eu-west-1",
    }.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def spool_address(tmp_path: Path) -> str:
    """Return the address of an empty folder, in the form DISTRANS_BLOBS expects."""
    (tmp_path / "spool").mkdir(mode=0o700)
    return f"file://{tmp_path / 'spool'}"
