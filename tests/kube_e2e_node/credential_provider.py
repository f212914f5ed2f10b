"""A credential provider of kubelet (KubeletCredentialProviders) for the node's locked registry.

The node suite's own provider asks Google for a password; this one answers with the registry's.
Under the name `NAMES[0]` it refuses requests with a token; under `NAMES[1]`, those without a token
of the pod's service account for `AUDIENCE`, or without the annotations that the spec sets.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

HOST = "gcr.io"
USER, PASSWORD = "node", "suite"
NAMES = ("gcp-credential-provider", "gcp-credential-provider-with-sa")
AUDIENCE = "test-audience"
ANNOTATIONS = {"domain.io/identity-id": "123456", "domain.io/identity-type": "serviceaccount"}
API = "credentialprovider.kubelet.k8s.io/v1"


def configuration() -> dict[str, object]:
    """Return kubelet's CredentialProviderConfig."""
    common = {"apiVersion": API, "matchImages": [HOST], "defaultCacheDuration": "1m"}
    attributes = {
        "serviceAccountTokenAudience": AUDIENCE,
        "cacheType": "Token",
        "requireServiceAccount": True,
        "requiredServiceAccountAnnotationKeys": sorted(ANNOTATIONS),
    }
    plain = {"name": NAMES[0], **common}
    with_token = {"name": NAMES[1], **common, "tokenAttributes": attributes}
    return {
        "kind": "CredentialProviderConfig",
        "apiVersion": "kubelet.config.k8s.io/v1",
        "providers": [plain, with_token],
    }


def install(folder: Path) -> list[str]:
    """Write the programs and the configuration into `folder`; return kubelet's flags."""
    programs = folder / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        script = programs / name
        script.write_text(f"#!{sys.executable}\n" + Path(__file__).read_text())
        script.chmod(0o755)
    file = folder / "providers.json"
    file.write_text(json.dumps(configuration()))
    prefix = "--image-credential-provider"
    return [f"{prefix}-config={file}", f"{prefix}-bin-dir={programs}"]


def main(name: str) -> int:
    """Answer kubelet's request on stdin as the provider `name`; return the exit code."""
    request = json.load(sys.stdin)
    token = request.get("serviceAccountToken", "")
    if name == NAMES[1]:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        refused = claims["aud"] != [AUDIENCE]
        refused = refused or request["serviceAccountAnnotations"] != ANNOTATIONS
    else:
        refused = bool(token)
    if refused:
        print(f"an unexpected request: {sorted(request)}", file=sys.stderr)
        return 1
    login = {"username": USER, "password": PASSWORD}
    answer = {
        "kind": "CredentialProviderResponse",
        "apiVersion": API,
        "cacheKeyType": "Registry",
        "auth": {HOST: login},
    }
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name))
