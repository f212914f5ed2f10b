"""The names and the coding of our private calls beside CRI, shared by server and command line: JSON objects over gRPC."""

from __future__ import annotations

import json
from typing import Any

SERVICE = "pyrunc.v1.Admin"
LOAD_IMAGE = "LoadImage"
TIMELINE = "Timeline"
FOLLOW_TIMELINE = "FollowTimeline"
COLLECT_GARBAGE = "CollectGarbage"
PULL_IMAGE = "PullImage"
PUSH_IMAGE = "PushImage"
TAG_IMAGE = "TagImage"
SAVE_IMAGES = "SaveImages"
CHECK_LOGIN = "CheckLogin"
DEBUG_STACKS = "DebugStacks"
DEBUG_PROFILE = "DebugProfile"
CONTAINER_CONFIG = "ContainerConfig"
PAUSE_CONTAINER = "PauseContainer"
UNPAUSE_CONTAINER = "UnpauseContainer"
PAUSED_CONTAINERS = "PausedContainers"


def path(call: str) -> str:
    """What gRPC calls it."""
    return f"/{SERVICE}/{call}"


def encode(value: dict[str, Any]) -> bytes:
    """A message."""
    return json.dumps(value).encode()


def decode(data: bytes) -> dict[str, Any]:
    """A message's object. Raises ValueError."""
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
