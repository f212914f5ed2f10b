"""Talks to the API server without kubectl, whose every start costs a second under emulation: JSON
over one open connection."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import urllib3

Json = dict[str, Any]
PKI = Path("/etc/kubernetes/pki")
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"


MANNER: Json = {
    "cert_file": str(PKI / "admin.crt"), "key_file": str(PKI / "admin.key"), "timeout": 60,
    "retries": urllib3.Retry(total=5, other=0, backoff_factor=0.5),
}  # fmt: skip


class Refused(Exception):
    """The API server answered with an error."""

    def __init__(self, method: str, path: str, status: int, text: str) -> None:
        super().__init__(f"{method} {path}: {status} {text}")
        self.status = status


class Api:
    """Sends requests as the cluster's administrator to the API server of
    /etc/kubernetes/admin.conf."""

    def __init__(self) -> None:
        server = re.search(r"https://([^:]+):(\d+)", Path("/etc/kubernetes/admin.conf").read_text())
        assert server
        self._pool = urllib3.HTTPSConnectionPool(
            server[1], int(server[2]), ca_certs=str(PKI / "ca.crt"), **MANNER
        )

    def get(self, path: str) -> Json:
        answer: Json = json.loads(self.text("GET", path))
        return answer

    def create(self, path: str, thing: Json) -> Json:
        """POST `thing`; return the object that the API server has made."""
        created: Json = json.loads(self.text("POST", path, thing))
        return created

    def patch(self, path: str, change: Json, kind: str = STRATEGIC) -> Json:
        """Change an object or its subresource and return it. `kind`: the content type of the
        patch."""
        patched: Json = json.loads(self.text("PATCH", path, change, kind))
        return patched

    def delete(self, path: str) -> None:
        """Delete an object; a missing one is no error."""
        try:
            self.text("DELETE", path)
        except Refused as refused:
            if refused.status != 404:
                raise

    def summary(self) -> Json:
        summary: Json = json.loads(self.kubelet("GET", "/stats/summary"))
        return summary

    def kubelet(self, method: str, path: str) -> bytes:
        """Return kubelet's reply; its self-signed certificate is accepted."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
            with urllib3.HTTPSConnectionPool(
                "127.0.0.1", 10250, cert_reqs="CERT_NONE", **MANNER
            ) as kubelet:
                answer = kubelet.request(method, path)
        assert answer.status == 200, answer.data
        return bytes(answer.data)

    def text(
        self, method: str, path: str, body: Json | None = None, kind: str = "application/json"
    ) -> str:
        """Return the text of the answer. Raises Refused when that is an error."""
        content = None if body is None else json.dumps(body).encode()
        answer = self._pool.request(
            method,
            path,
            body=content,
            headers={"Content-Type": kind, "Accept": "application/json, */*"},
        )
        text = answer.data.decode(errors="replace")
        if answer.status >= 300:
            raise Refused(method, path, answer.status, text[:2000])
        return text
