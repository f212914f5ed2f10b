"""The server's configuration: a TOML file with drop-ins, and flags that override keys. Every key
has a default.

An unknown key, a wrong type or a value out of range is an error that names file, line and key. The
server checks all keys before it starts anything.
"""

from cri_server.config.loader import DEFAULT_PATH, load, load_with_origins
from cri_server.config.model import Config, NetworkConfig, ServerConfig

__all__ = [
    "DEFAULT_PATH",
    "Config",
    "NetworkConfig",
    "ServerConfig",
    "load",
    "load_with_origins",
]
