"""Tests that an attacker in the process that decodes or unpacks a layer cannot reach the host."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from cri_server.images.layers.ring import Receiver, open_ends
from cri_server.images.store.unpacked_layers import Layers
from pyrunc.atomic_file import DamagedRecord
from pyrunc.kernel.call import raw, syscall
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.tree import remove_path
from tests.cri.images import exploit
from tests.support.zygotes import start_zygote

IPC_PRIVATE, IPC_RMID = 0, 0


@pytest.mark.parametrize("landlock", [2, 5], ids=["as Linux 6.1", "newest"])
async def test_all_attempts_of_a_compromised_unpacker_fail(tmp_path: Path, landlock: int) -> None:
    folder, canary = tmp_path / "layer", tmp_path / "canary"
    folder.mkdir()
    canary.write_text("unharmed")
    before = canary.stat()
    memory = syscall("shmget", "", IPC_PRIVATE, 4096, 0o600)
    zygote = await start_zygote(["tests.cri.images.exploit"])
    reading, writing = os.pipe()
    try:
        os.write(writing, b"the blob")
        attack = exploit.AttackArguments(str(folder), str(canary), os.getpid(), landlock, memory)
        result = await zygote.run(
            "tests.cri.images.exploit:try_all", attack, [reading], timeout_s=90
        )
    finally:
        os.close(reading)
        os.close(writing)
        await zygote.close()
        there = raw("shmctl", memory, IPC_RMID, None)
    assert result.exit_code == 0, result.stderr.decode()
    assert there == 0, "the memory was removed"
    answer = json.loads(result.stdout)
    with socket.socket() as any_socket:
        assert len(exploit.attempts(attack, str(folder), any_socket)) > 50
    assert answer["succeeded"] == []
    assert {"d", "link", "whiteout"} <= set(answer["works"]) and (
        folder / "d/file"
    ).read_text() == "the blob"
    assert canary.stat() == before and not os.listxattr(canary)
    assert canary.read_text() == "unharmed" and {p.name for p in tmp_path.iterdir()} == {
        "layer",
        "canary",
    }


async def test_all_attempts_of_a_compromised_decoder_fail(tmp_path: Path) -> None:
    """An attacker in the process that decompresses a layer can use only the open descriptors, and
    change only the output."""
    folder, canary = tmp_path / "layer", tmp_path / "canary"
    folder.mkdir()
    canary.write_text("unharmed")
    before = tmp_path.stat().st_mode, folder.stat(), canary.stat()
    memory = syscall("shmget", "", IPC_PRIVATE, 4096, 0o600)
    zygote = await start_zygote(["tests.cri.images.exploit"])
    content = b"the blob" * 20_000
    blob = tmp_path / "blob"
    blob.write_bytes(gzip.compress(content))
    sending, receiving = open_ends()
    with open(blob, "rb") as file:
        try:
            attack = exploit.AttackArguments(str(folder), str(canary), os.getpid(), 5, memory)
            result = await zygote.run(
                "tests.cri.images.exploit:try_all_of_a_decoder",
                attack,
                [file.fileno(), *sending, file.fileno()],
                timeout_s=90,
            )
        finally:
            await zygote.close()
            close_all(sending)
            there = raw("shmctl", memory, IPC_RMID, None)
    assert result.exit_code == 0, result.stderr.decode()
    assert there == 0, "the memory was removed"
    assert json.loads(result.stdout) == {"succeeded": []}
    receiver = Receiver(*receiving, copying=True)
    try:
        output = b"".join(bytes(part) for part in iter(receiver.read, b""))
    finally:
        receiver.close()
    assert output == content
    assert before == (tmp_path.stat().st_mode, folder.stat(), canary.stat())
    assert {p.name for p in tmp_path.rglob("*")} == {"layer", "canary", "blob"}


@pytest.mark.parametrize(
    "what", ["a link for the tree", "a link for the record", "a pipe", "a folder"]
)
def test_files_of_a_compromised_unpacker_are_not_trusted(tmp_path: Path, what: str) -> None:
    """When a compromised unpacker leaves a link or a pipe in place of its files, the privileged
    server must not follow the link, change the host, or wait for the pipe."""
    layers = Layers(tmp_path)
    layers.prepare()
    host = tmp_path / "host"
    (host / "etc").mkdir(parents=True, mode=0o700)
    folder = Path(layers.new_folder())
    (folder / "tree/etc").mkdir(parents=True)
    record = {
        "version": 1,
        "diff_id": "sha256:" + "0" * 64,
        "size_bytes": 1,
        "inodes": 1,
        "implicit": ["etc"],
        "devices": [],
    }
    (folder / "layer.json").write_text(json.dumps(record))
    if what == "a link for the tree":
        shutil.rmtree(folder / "tree")
        (folder / "tree").symlink_to(host)
    else:
        (folder / "layer.json").rename(host / "layer.json")
        {
            "a link for the record": lambda: (folder / "layer.json").symlink_to(
                host / "layer.json"
            ),
            "a pipe": lambda: os.mkfifo(folder / "layer.json"),
            "a folder": lambda: (folder / "layer.json").mkdir(),
        }[what]()
    with pytest.raises(DamagedRecord, match="wrong file type"):
        layers.commit(str(folder), ["sha256:" + "1" * 64])
    assert (
        list((tmp_path / "layers").iterdir()) == []
        and (host / "etc").stat().st_mode & 0o777 == 0o700
    )
    remove_path(folder)
    assert (host / "etc").is_dir() and not folder.exists()
