"""A real S3-protocol server on loopback (moto's), and a proxy before it that throttles and drops on demand."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

_METHOD = re.compile(rb"(GET|PUT|POST|HEAD|DELETE) ")
_SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: 63\r\n\r\n"
    b"<Error><Code>SlowDown</Code><Message>Slow down</Message></Error>"
)


class FlakyProxy:
    """Relays TCP to the server, and counts requests. A client sends its next request only after the answer to the last.

    Attributes:
        throttle: so many of the next requests are answered with 503 instead.
        drop: so many of the next answers are cut off after `drop_after` bytes.
        only: the method of the requests to which that happens, if it is not to happen to all.
        skip: so many of these are let through first.
        requests: the methods of all requests seen.
    """

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.throttle = 0
        self.drop = 0
        self.drop_after = 0
        self.only = b""
        self.skip = 0
        self.requests: list[bytes] = []
        self._upstream = upstream
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(self._upstream)
        cut = threading.Event()
        threading.Thread(target=self._answer, args=(server, client, cut), daemon=True).start()
        with contextlib.suppress(OSError), client, server:
            while data := client.recv(1 << 16):
                method = _METHOD.match(data)
                if method:
                    with self._lock:
                        self.requests.append(method[1])
                        meant = not self.only or self.only == method[1]
                        if meant and self.skip:
                            self.skip -= 1
                            meant = False
                        throttled = meant and self.throttle > 0
                        dropped = meant and not throttled and self.drop > 0
                        self.throttle -= throttled
                        self.drop -= dropped
                    if throttled:
                        client.sendall(_SLOW_DOWN)
                        client.shutdown(socket.SHUT_WR)
                        while client.recv(1 << 16):  # a body that is still coming must not turn the answer into a reset
                            pass
                        return
                    if dropped:
                        cut.set()
                    data = self.request(data)
                server.sendall(data)

    def _answer(self, server: socket.socket, client: socket.socket, cut: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if cut.is_set():
                    client.sendall(data[: self.drop_after])
                    client.shutdown(socket.SHUT_RDWR)
                    server.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(self.answer(data))
            client.shutdown(socket.SHUT_RDWR)

    def request(self, data: bytes) -> bytes:
        """The beginning of a request, as the server is to see it."""
        return data

    def answer(self, data: bytes) -> bytes:
        """A part of an answer, as the client is to see it."""
        return data


class S3Server:
    """moto's server in a thread of this process, with one bucket; `environ` is what a client of it needs."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.address: tuple[str, int] = self._server.get_host_and_port()
        self.url = f"http://{self.address[0]}:{self.address[1]}"
        self.make_bucket("bucket")

    def make_bucket(self, name: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT"), timeout=10).close()

    def environ(self, url: str | None = None) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }

    def unfinished_uploads(self) -> int:
        with urllib.request.urlopen(f"{self.url}/bucket?uploads", timeout=10) as answer:
            return int(answer.read().count(b"<UploadId>"))

    def close(self) -> None:
        self._server.stop()


@contextlib.contextmanager
def serving() -> Iterator[tuple[S3Server, FlakyProxy]]:
    server: Any = S3Server()
    proxy = FlakyProxy(server.address)
    try:
        yield server, proxy
    finally:
        proxy.close()
        server.close()
