"""The process that unpacks can do its work and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pyrunc.zygote.client import Zygote
from tests.cri.images import exploit


async def test_nothing_an_attacker_would_try_works(tmp_path: Path) -> None:
    folder, canary = tmp_path / "layer", tmp_path / "canary"
    folder.mkdir()
    canary.write_text("unharmed")
    zygote = await Zygote.start(["tests.cri.images.exploit"])
    reading, writing = os.pipe()
    try:
        os.write(writing, b"the blob")
        arguments = {"folder": str(folder), "canary": str(canary), "server_pid": os.getpid()}
        result = await zygote.run("tests.cri.images.exploit:try_all", arguments, [reading], timeout_s=90)
    finally:
        os.close(reading)
        os.close(writing)
        await zygote.close()
    assert result.exit_code == 0, result.stderr.decode()
    answer = json.loads(result.stdout)
    assert answer["succeeded"] == [] and len(exploit.attempts(arguments)) > 40
    assert {"d", "link", "whiteout"} <= set(answer["works"]) and (folder / "d/file").read_text() == "the blob"
    assert canary.read_text() == "unharmed" and {p.name for p in tmp_path.iterdir()} == {"layer", "canary"}
