"""Servers of object stores for all tests; a test that cannot have its own is skipped and says what is missing."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator

import pytest

from tests.reshard.storage.other_servers import Azurite, GoogleProxy
from tests.reshard.storage.s3_server import FlakyProxy, S3Server, serving


@pytest.fixture(scope="session")
def _serving() -> Iterator[tuple[S3Server, FlakyProxy]]:
    missing = [name for name in ("obstore", "moto", "flask", "flask_cors") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[object-stores,test]'")
    with serving() as both:
        yield both


@pytest.fixture
def s3(_serving: tuple[S3Server, FlakyProxy], monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server; `open_storage("s3://bucket/...")` reaches it."""
    server, _ = _serving
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def proxy(_serving: tuple[S3Server, FlakyProxy], s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyProxy]:
    """The way to the server through a proxy that can misbehave; `open_storage("s3://bucket/...")` goes through it."""
    _, proxy = _serving
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    proxy.throttle = proxy.drop = proxy.drop_after = proxy.skip = 0
    proxy.only = b""
    proxy.requests.clear()
    yield proxy
    proxy.throttle = proxy.drop = 0


@pytest.fixture(scope="session")
def _azurite() -> Iterator[Azurite]:
    if importlib.util.find_spec("obstore") is None or not Azurite.program():
        pytest.skip("needs obstore, and the program azurite-blob: npm install -g azurite")
    server = Azurite()
    yield server
    server.close()


@pytest.fixture
def azure(_azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of Microsoft's emulator of Azure."""
    for name, value in _azurite.environ().items():
        monkeypatch.setenv(name, value)
    return f"az://container/{uuid.uuid4().hex}"


@pytest.fixture
def google(_serving: tuple[S3Server, FlakyProxy], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of a server that speaks Google Cloud Storage's dialect."""
    proxy = GoogleProxy(_serving[0].address)
    for name, value in proxy.environ().items():
        monkeypatch.setenv(name, value)
    yield f"gs://bucket/{uuid.uuid4().hex}"
    proxy.close()
