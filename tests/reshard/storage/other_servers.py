"""Servers for clients of Azure and of Google Cloud Storage: an emulator that is a program, and a translating proxy."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import http.client
import json
import re
import shutil
import socket
import subprocess
import time

from tests.reshard.storage.s3_server import FlakyProxy

_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The published account and key of every such emulator."""


class Azurite:
    """Microsoft's emulator of Azure's blobs, in memory, with one container."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        program = self.program()
        assert program is not None
        options = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--inMemoryPersistence"]
        self._process = subprocess.Popen(
            [program, "--blobHost", "127.0.0.1", "--blobPort", str(self.port), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 60.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except ConnectionRefusedError:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise
                time.sleep(0.1)
        self._make_container("container")

    @staticmethod
    def program() -> str | None:
        return shutil.which("azurite-blob")

    def _make_container(self, name: str) -> None:
        """The client makes none: a request signed as the protocol wants it."""
        headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        signed = "PUT" + 12 * "\n" + "".join(f"{name}:{value}\n" for name, value in headers.items())
        signed += f"/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
        mac = hmac.new(base64.b64decode(_KEY), signed.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(mac).decode()}"
        headers["Content-Length"] = "0"
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("PUT", f"/{_ACCOUNT}/{name}?restype=container", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
        connection.close()

    def environ(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{self.port}",
            "NO_PROXY": "127.0.0.1",
        }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


class GoogleProxy(FlakyProxy):
    """From the XML dialect of Google Cloud Storage to the S3 that it descends from.

    What the client of obstore uses of it differs in how requests are signed, in the condition under which an object is
    made, and in that objects have generations.
    """

    _SIGNED = b"Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"

    def request(self, data: bytes) -> bytes:
        head, end, body = data.partition(b"\r\n\r\n")
        head = re.sub(rb"(?i)\r\nauthorization:[^\r]*", b"", head)
        head = re.sub(rb"(?i)\r\nx-goog-if-generation-match: 0", b"\r\nif-none-match: *", head)
        return head + b"\r\nauthorization: AWS4-HMAC-SHA256 " + self._SIGNED + end + body

    def answer(self, data: bytes) -> bytes:
        if not data.startswith(b"HTTP/1.1 "):
            return data
        line, end, rest = data.partition(b"\r\n")
        return line + b"\r\nx-goog-generation: 1" + end + rest

    def environ(self) -> dict[str, str]:
        account = {"client_email": "", "private_key": "", "private_key_id": ""}
        key = {"gcs_base_url": self.url, "disable_oauth": True, **account}
        return {
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key),
            "GOOGLE_ALLOW_HTTP": "true",
            "NO_PROXY": "127.0.0.1",
        }
