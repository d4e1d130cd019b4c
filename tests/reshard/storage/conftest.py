"""One S3 server for all tests of storages; a test that cannot have it is skipped and says what is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.reshard.storage.s3_server import FlakyProxy, S3Server, serving


@pytest.fixture(scope="session")
def _serving() -> Iterator[tuple[S3Server, FlakyProxy]]:
    missing = [name for name in ("obstore", "moto", "flask", "flask_cors") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'reshard[object-stores,test]'")
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
