"""A distant object store: the files of a folder by S3's protocol, with a latency and a bandwidth.

    with serving(folder, latency_s=0.02, bytes_per_s=40e6) as store:
        ...  # s3://bucket/... at store.url; or store.url + "/bucket/..." by plain HTTP

It is read-only: GET with or without a range, HEAD, and ListObjectsV2. Each request waits for `latency_s` before the
first byte of its response, and each connection has the bandwidth `bytes_per_s`, as single connections to real stores
do. The server is a separate process. It counts requests.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["Asked", "FarStore", "serving"]

BUCKET = "bucket"
_TALLY = "/-/tally"
_PIECE_BYTES = 64 << 10
"""Bytes that are sent at once. The pace is kept between pieces."""


@dataclass(frozen=True)
class Asked:
    """The requests to the server so far."""

    requests: tuple[str, ...]
    """In order of arrival: "GET name [first, last]", "HEAD name", or "LIST prefix"."""
    nbytes: int
    """Bytes of objects that were sent."""

    def since(self, before: Asked) -> Asked:
        """Return the requests since an earlier state."""
        return Asked(self.requests[len(before.requests) :], self.nbytes - before.nbytes)


@dataclass(frozen=True)
class FarStore:
    """A running server."""

    url: str

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables by which S3 clients find the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }

    def asked(self) -> Asked:
        """The requests so far. This call has no latency, and is not counted."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + _TALLY, timeout=60) as answer:
            found = json.load(answer)
        return Asked(tuple(found["requests"]), found["nbytes"])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests are counted."""

    def do_HEAD(self) -> None:
        self._object(body=False)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == _TALLY:
            self._send(200, json.dumps({"requests": self.server.requests, "nbytes": self.server.nbytes}).encode())
        elif url.path.strip("/") == BUCKET:
            self._list({key: values[0] for key, values in parse_qs(url.query).items()})
        else:
            self._object(body=True)

    def _object(self, *, body: bool) -> None:
        name = unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = self.server.folder / name
        exists = path.is_file()
        size = path.stat().st_size if exists else 0
        start, stop = (int(asked[1]), min(int(asked[2] or size) + 1, size)) if asked else (0, size)
        self._note(f"{self.command} {name}" + (f" [{start}, {stop - 1}]" if asked else ""))
        if not exists:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>" if body else b"")
            return
        if asked and start >= size:
            self._send(416, b"<Error><Code>InvalidRange</Code></Error>")
            return
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}-{size:x}"')
        self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        self.end_headers()
        if body:
            with path.open("rb") as file:
                self._send_slowly(file.fileno(), start, stop)

    def _send_slowly(self, file: int, start: int, stop: int) -> None:
        began, sent = time.monotonic(), 0
        self.wfile.flush()
        while start + sent < stop:
            nbytes = min(_PIECE_BYTES, stop - start - sent)
            sent += os.sendfile(self.connection.fileno(), file, start + sent, nbytes)
            ahead = sent / self.server.bytes_per_s - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(ahead)
        with self.server.lock:
            self.server.nbytes += sent

    def _list(self, query: dict[str, str]) -> None:
        prefix, folders = query.get("prefix", ""), "delimiter" in query
        self._note(f"LIST {prefix}")
        names = [str(path.relative_to(self.server.folder)) for path in self.server.folder.rglob("*") if path.is_file()]
        names = sorted(name for name in names if name.startswith(prefix))
        below = sorted(
            {
                prefix + name[len(prefix) :].partition("/")[0] + "/"
                for name in names
                if folders and "/" in name[len(prefix) :]
            }
        )
        rows = [
            f"<Contents><Key>{escape(name)}</Key><Size>{stat.st_size}</Size><ETag>&quot;{stat.st_mtime_ns:x}&quot;</ETag>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(stat.st_mtime))}</LastModified>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for name in names
            if not (folders and "/" in name[len(prefix) :])
            for stat in [(self.server.folder / name).stat()]
        ]
        rows += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in below]
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
            f"<MaxKeys>1000000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
        )
        self._send(200, text.encode())

    def _note(self, text: str) -> None:
        self.server.requests.append(text)
        time.sleep(self.server.latency_s)

    def _send(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, folder: Path, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.latency_s, self.bytes_per_s = folder, latency_s, bytes_per_s
        self.requests: list[str] = []
        self.nbytes = 0
        self.lock = threading.Lock()


def _serve(folder: str, latency_s: float, bytes_per_s: float, ready: Any) -> None:
    server = _Server(Path(folder), latency_s, bytes_per_s)
    ready.put(server.server_port)
    server.serve_forever()


@contextmanager
def serving(folder: str, *, latency_s: float, bytes_per_s: float) -> Iterator[FarStore]:
    """Serve the current and later files in `folder` until the end of the block."""
    context = get_context("spawn")
    ready = context.SimpleQueue()
    process = context.Process(target=_serve, args=(folder, latency_s, bytes_per_s, ready), daemon=True)
    process.start()
    try:
        yield FarStore(f"http://127.0.0.1:{ready.get()}")
    finally:
        process.terminate()
        process.join()
