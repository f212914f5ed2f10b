"""Makes a cluster's certificate authority (CA), certificates that the CA signs, and kubeconfigs
that use them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

_EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DAYS = "365"
NAMES = (
    "IP:127.0.0.1",
    "IP:10.96.0.1",
    "DNS:localhost",
    *(
        f"DNS:kubernetes{rest}"
        for rest in ("", ".default", ".default.svc", ".default.svc.cluster.local")
    ),
)


class Authority:
    """Signs a cluster's certificates.

    `folder` gets ca.crt and ca.key, NAME.crt and NAME.key for each certificate, sa.key and sa.pub
    for service accounts' tokens.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Make the CA, and the key that signs service accounts' tokens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        self._openssl(
            "req", "-x509", *_EC_KEY, *self._pair("ca"), "-days", _DAYS, "-subj", "/CN=ca", *usage
        )
        self._openssl("genrsa", "-out", f"{self.folder}/sa.key", "2048")
        self._openssl(
            "rsa", "-in", f"{self.folder}/sa.key", "-pubout", "-out", f"{self.folder}/sa.pub"
        )

    def sign(self, name: str, subject: str, names: Iterable[str] = ()) -> None:
        """Sign a certificate for `subject`, valid for `names` (`IP:…`, `DNS:…`) and the names in
        NAMES."""
        extensions, request = self.folder / f"{name}.names", f"{self.folder}/{name}.csr"
        extensions.write_text(
            f"subjectAltName={','.join([*NAMES, *names])}\n"
            "authorityKeyIdentifier=keyid\nkeyUsage=digitalSignature\n"
        )
        self._openssl(
            "req",
            *_EC_KEY,
            "-keyout",
            f"{self.folder}/{name}.key",
            "-out",
            request,
            "-subj",
            subject,
        )
        self._openssl(
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            f"{self.folder}/ca.crt",
            "-CAkey",
            f"{self.folder}/ca.key",
            "-CAcreateserial",
            "-days",
            _DAYS,
            "-out",
            f"{self.folder}/{name}.crt",
            "-extfile",
            str(extensions),
        )

    def sign_for_cluster(self, names: Iterable[str], nodes: Iterable[str]) -> None:
        """Sign the certificates of a cluster:

        - apiserver: the API server's, also valid for `names`.
        - front-proxy: the API server's client certificate for API servers that extend it.
        - admin: the administrator's.
        - each of `nodes`: the kubelet's client certificate.
        """
        self.sign("apiserver", "/CN=kube-apiserver", names)
        self.sign("front-proxy", "/CN=front-proxy")
        self.sign("admin", "/O=system:masters/CN=admin")
        for node in nodes:
            self.sign(node, f"/O=system:masters/CN=system:node:{node}")

    def write_kubeconfig(self, path: Path, user: str, server: str) -> None:
        """Write a kubeconfig that uses the certificate called `user`; `server` is HOST:PORT."""
        own = self.folder
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "pyrunc",
            "clusters": [
                {
                    "name": "pyrunc",
                    "cluster": {
                        "server": f"https://{server}",
                        "certificate-authority": f"{own}/ca.crt",
                    },
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate": f"{own}/{user}.crt",
                        "client-key": f"{own}/{user}.key",
                    },
                }
            ],
            "contexts": [{"name": "pyrunc", "context": {"cluster": "pyrunc", "user": user}}],
        }
        path.write_text(json.dumps(config, indent=1))

    def _pair(self, name: str) -> tuple[str, str, str, str]:
        return ("-keyout", f"{self.folder}/{name}.key", "-out", f"{self.folder}/{name}.crt")

    @staticmethod
    def _openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
