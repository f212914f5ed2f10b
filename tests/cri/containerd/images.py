"""Makes the images that containerd's CRI integration tests use."""

from __future__ import annotations

import json
from collections.abc import Mapping

from cri_server.images.archives import build
from cri_server.images.archives.build import BuiltImage, LayerFile
from tests.support import nginx
from tests.support.images import pause, with_files
from tests.support.registry import archive_images

HOST = "registry.k8s.io"
_USERS = {
    "etc/passwd": (
        "root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1:daemon:/:/bin/false\n"
        "nobody:x:65534:65534:nobody:/:/bin/false\n"
    ),
    "etc/group": "root:x:0:\ndaemon:x:1:\nwheel:x:10:root\nnogroup:x:65534:\n",
}
VOLUMES = {
    "/test_dir": "test_file",
    "/C:/weird_test_dir": "weird_test_file",
    "/:colon_prefixed": "colon_prefixed_file",
}
# Takes 100 MB and holds them, as the suite's program `stress` must: in a buffer that is not read.
STRESS = "#!/bin/sh\ndd if=/dev/zero bs=105M count=1 | sleep 30\n"
# It says when it starts workers, through a path that leads to its standard error.
NGINX_SETTINGS = "daemon off; error_log /dev/stderr notice;"


WORDS = (
    "Alpine",
    "BusyBox",
    "Pause",
    "ResourceConsumer",
    "VolumeCopyUp",
    "VolumeOwnership",
    "Nginx",
)
"""The suite's own."""


def all_of_them() -> Mapping[str, BuiltImage]:
    """Return a dict: the suite's name -> image, of all images that the suite uses."""
    (web,) = archive_images(nginx.archive()).values()
    settings = {**nginx.CONFIG, "Cmd": ["nginx", "-g", NGINX_SETTINGS]}
    return {**of_a_shell(), "Nginx": build.image(web.layers, settings)}


def of_a_shell() -> Mapping[str, BuiltImage]:
    """Return a dict: the suite's name -> image, of the images that need only this machine's
    busybox."""
    shell = build.busybox()
    users = build.image([*shell.layers, build.layer(_USERS)], {"Cmd": ["sh"]})
    return {
        "Alpine": users,
        "BusyBox": users,
        "Pause": pause(),
        "ResourceConsumer": with_files(
            users, {"bin/stress": LayerFile(STRESS.encode(), 0o755)}, Cmd=["sleep", "3600"]
        ),
        "VolumeCopyUp": with_files(
            users,
            {f"{place[1:]}/{name}": "test_content\n" for place, name in VOLUMES.items()},
            Volumes={"/test_dir": {}, "C:/weird_test_dir": {}, "/:colon_prefixed": {}},
        ),
        "VolumeOwnership": with_files(
            users, {"test_dir": _owned_by_nobody()}, Volumes={"/test_dir": {}}
        ),
    }


def reference(word: str) -> str:
    """Return the registry reference of the suite's image `word`."""
    return f"{HOST}/suite/{word.lower()}:1"


def image_list() -> str:
    """Return the TOML file that tells the suite the name of each of its images in the registry."""
    return "".join(f"{word} = {json.dumps(reference(word))}\n" for word in WORDS)


def _owned_by_nobody() -> LayerFile:
    return build.directory(uid=65534, gid=65534)
