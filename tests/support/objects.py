"""An S3-compatible store in this process, and databases whose blobs are in it."""

import uuid
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest

BUCKET = "tensors"


@pytest.fixture(scope="session")
def object_server() -> Iterator[str]:
    """The address of moto's server."""
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
    """The address of an empty prefix, as DISTRANS_BLOBS has it."""
    for name, value in {
        "AWS_ENDPOINT_URL": object_server,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "eu-west-1",
    }.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"
