"""`pyrunc-cri runp` and `create`: make pods and containers from CRI messages in JSON or YAML, as
crictl does."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, TypeVar

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion
from cri_server.cli.arguments.files import FILE
from cri_server.cli.connection.client import Client
from cri_server.cli.images import credentials, transfer
from pyrunc.errors import InvalidSpec

Message = TypeVar("Message", api.PodSandboxConfig, api.ContainerConfig)


def parse(path: Path, message: Message) -> Message:
    """Read the CRI message in a JSON or YAML file into `message` and return it. Accepts CRI's field
    names and protobuf's JSON names. Raises InvalidSpec, also for an unknown field."""
    import yaml
    from google.protobuf import json_format

    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise InvalidSpec(str(path), "expected an object")
        _encode_variables(document)
        return json_format.ParseDict(document, message)
    except OSError as error:
        raise InvalidSpec(str(path), f"cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidSpec(str(path), f"neither JSON nor YAML: {error}") from None
    except json_format.ParseError as error:
        raise InvalidSpec(str(path), str(error)) from None


def _encode_variables(document: dict[str, Any]) -> None:
    """Encode the values of environment variables as base64, the form of bytes in protobuf's
    JSON."""
    # The values are bytes since CRI 1.36.3; crictl's files have text.
    variables = document.get("envs")
    for variable in variables if isinstance(variables, list) else ():
        if isinstance(variable, dict) and isinstance(variable.get("value"), str):
            variable["value"] = base64.b64encode(variable["value"].encode()).decode()


@click.command()
@click.argument("file", type=FILE, metavar="POD-CONFIG")
@click.option("--runtime", default="", metavar="HANDLER", help="The runtime handler of the pod.")
@click.pass_obj
def runp(address: str, file: Path, runtime: str) -> None:
    """Run a pod sandbox and print its id.

    The file contains CRI's PodSandboxConfig.
    """
    config = parse(file, api.PodSandboxConfig())
    with Client(address) as client:
        click.echo(client.run_pod(config, runtime))


@click.command()
@click.argument("pod", shell_complete=completion.pods)
@click.argument("container_file", type=FILE, metavar="CONTAINER-CONFIG")
@click.argument("pod_file", type=FILE, metavar="POD-CONFIG")
@click.option("--with-pull", is_flag=True, help="Pull the image first.")
@click.pass_obj
def create(address: str, pod: str, container_file: Path, pod_file: Path, with_pull: bool) -> None:
    """Create a container in POD and print its id; `start` starts it.

    The files contain CRI's ContainerConfig and PodSandboxConfig.
    """
    config = parse(container_file, api.ContainerConfig())
    sandbox = parse(pod_file, api.PodSandboxConfig())
    with Client(address) as client:
        identifier = client.pod(pod).id
        if with_pull:
            reference = config.image.image
            transfer.fetch(client, reference, credentials.find(reference))
        click.echo(client.create_container(identifier, config, sandbox))
