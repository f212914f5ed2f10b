"""`make bench-images`: compares images on containerd and on our server in one run: pull, first
start, removal, disk, and page cache.

The servers take turns and pull from a registry on the loopback of their network namespace.
BENCH='--tmpfs' has the images on a tmpfs; otherwise they are on the disk of the temporary folder.
BENCH='--large' pulls 1 GB in 60,000 files, and does not measure the page cache; '--tree /usr' takes
files of this machine, which decompress at another speed than generated ones. Ratios below 1 mean
that ours is faster, or smaller.

'--collected 60000' removes an image with that many files before each pull, as kubelet's garbage
collection does. This slows the pull down: for minutes ext4 skips inodes that were deleted (Linux,
fs/ext4/ialloc.c, recently_deleted()).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from cri_server.images.archives.build import BuiltImage, LayerFile
from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.kernel.namespace import setns
from tests.bench import servers
from tests.bench.load import Bench
from tests.bench.servers import Server
from tests.bench.tables import medians, table, where
from tests.support.processes import wait_until
from tests.support.registry import Registry

PULL_TIMEOUT_S = 900
TARS_DROPPED_S = 75  # a little more than twice cri_server.images.service.DROP_TAR_PAGES_S
COLLECTED_BYTES = 1000
READ_ALL = "cat /data/*/* >/dev/null"


def made_up(files: int, size_bytes: int) -> list[bytes]:
    """Return generated contents of files, which compress to about half."""
    chance = random.Random(files)
    return [chance.randbytes(size_bytes // 2).hex().encode() for _ in range(files)]


def sampled(tree: Path, files: int) -> list[bytes]:
    """Return the contents of some files below a folder of this machine: the same files as long as
    the folder does not change."""
    paths = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    return [
        path.read_bytes() for path in random.Random(files).sample(paths, min(files, len(paths)))
    ]


def image_of(contents: Sequence[bytes], layers: int) -> BuiltImage:
    """Build an image of busybox and, in `layers` layers, files with these contents."""
    tars = []
    for number in range(layers):
        some = range(number, len(contents), layers)
        tars.append(build.layer({f"data/{n % 50}/{n}": LayerFile(contents[n]) for n in some}))
    return build.image([*build.busybox().layers, *tars], {"Cmd": ["sleep", "3600"]})


class Side:
    """A server under measurement, with a registry that it reaches, and its image folder."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.bench = Bench(server, folder, image="")
        self.store = server.store
        self.registry = _in_namespace(server.namespace, lambda: Registry(folder / "registry"))
        # containerd needs this file, or it asks for TLS
        hosts = self.store.parent / "certs.d" / self.registry.host / "hosts.toml"
        hosts.parent.mkdir(parents=True)
        hosts.write_text(f'server = "{self.registry.url}"\n')

    def pull(self, name: str, step: str) -> None:
        self.bench.image = f"{self.registry.host}/{name}"
        before, begin = disk_bytes(self.store), time.perf_counter()
        request = api.PullImageRequest(image=api.ImageSpec(image=self.bench.image))
        self.bench.client.image.PullImage(request, timeout=PULL_TIMEOUT_S)
        self.bench._sample(f"pull, {step}", begin)
        self.bench.rates[f"MiB on disk, {step}"].append((disk_bytes(self.store) - before) / 2**20)

    def remove(self, step: str) -> None:
        begin = time.perf_counter()
        self.bench.client.image.RemoveImage(
            api.RemoveImageRequest(image=api.ImageSpec(image=self.bench.image)),
            timeout=PULL_TIMEOUT_S,
        )
        self.bench._sample(f"removal, {step}", begin)

    def start(self, label: str, step: str) -> tuple[str, str]:
        """Start a pod of the image, and record the time of create and start; return the ids of pod
        and container."""
        bench = self.bench
        bench.samples.pop("CreateContainer", None), bench.samples.pop("StartContainer", None)
        pair = bench.up(label)
        took = bench.samples["CreateContainer"][-1] + bench.samples["StartContainer"][-1]
        bench.samples[f"create + start, {step}"].append(took)
        return pair

    def read_all(self, container: str, step: str) -> None:
        begin = time.perf_counter()
        request = api.ExecSyncRequest(
            container_id=container, cmd=["sh", "-c", READ_ALL], timeout=100
        )
        assert self.bench.client.runtime.ExecSync(request, timeout=110).exit_code == 0
        self.bench._sample(f"read all files, {step}", begin)

    def cached_tars(self) -> int:
        """Return the bytes of our layers' tars in the page cache, without the pages of containers'
        mounts; 0 for containerd."""
        return cached(_files(self.store / "images/tars"))

    def wait_until_dropped(self) -> None:
        """Wait until our server has dropped its layers' tars from the page cache; files on a tmpfs
        stay in memory."""
        before = self.cached_tars()
        wait_until(
            lambda: not before or self.cached_tars() < before / 10, TARS_DROPPED_S, every_s=5
        )

    def note_cache(self, step: str, seen_bytes: int) -> None:
        """Record in MiB the page cache that containers see, `seen_bytes`, plus that of our layers'
        tars."""
        name = f"MiB of page cache, {step}"
        self.bench.rates[name].append((seen_bytes + self.cached_tars()) / 2**20)

    def pid(self, container: str) -> int:
        request = api.ContainerStatusRequest(container_id=container, verbose=True)
        reply = self.bench.client.runtime.ContainerStatus(request, timeout=10)
        return int(json.loads(reply.info["info"])["pid"])


def _in_namespace(name: str, make: Callable[[], Registry]) -> Registry:
    """Return `make()`, called in the network namespace `name`."""
    registries: list[Registry] = []

    def run() -> None:
        namespace = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        setns(namespace, CLONE_NEWNET)
        os.close(namespace)
        registries.append(make())

    # In a thread, because sockets belong to the network namespace of the thread that makes them.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return registries[0]


def disk_bytes(folder: Path) -> int:
    done = subprocess.run(
        ["du", "-sx", "--block-size=1", folder], capture_output=True, text=True, check=False
    )
    return int(done.stdout.split()[0])


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


def cached(files: Sequence[Path]) -> int:
    """Return how many bytes of these files are in the page cache, by mincore(2)."""
    total = 0
    for at in range(0, len(files), 500):
        command = ["fincore", "-b", "-n", "-r", "-o", "RES", *map(str, files[at : at + 500])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        total += sum(map(int, done.stdout.split()))
    return total


@contextmanager
def sides(folder: Path) -> Iterator[list[Side]]:
    with servers.running(folder) as running, ExitStack() as stack:
        all_sides = [Side(server, folder / f"load-{server.namespace}") for server in running]
        for side in all_sides:
            stack.enter_context(side.registry)
        yield all_sides


def measure(all_sides: list[Side], options: argparse.Namespace, contents: Sequence[bytes]) -> None:
    """Run all steps, each on one server after the other."""
    for layers in (1,) if options.large else (1, 12):
        step, built = f"{layers} layer{'s' * (layers > 1)}", image_of(contents, layers)
        for side in all_sides:
            side.registry.push("bench:1", built)
            if options.collected:
                side.registry.push(
                    "collected:1", image_of(made_up(options.collected, COLLECTED_BYTES), 1)
                )
        for number in range(options.rounds):
            for side in all_sides:
                if options.collected:
                    side.pull("collected:1", "to be collected")
                    side.remove("to be collected")
                side.pull("bench:1", step)
                if layers == 1:
                    pair = side.start(f"first-{number}", "first")
                    side.read_all(pair[1], "first")
                    side.bench.down(pair)
                side.remove(step)


def share(all_sides: list[Side], containers: int) -> None:
    """Measure the page cache that many containers of one image use, each of which reads the whole
    image."""
    for side in all_sides:
        side.pull("bench:1", "shared")
        pairs = [side.start(f"many-{number}", "many") for number in range(containers)]
        total = 0
        for number, (_, container) in enumerate(pairs):
            files = _files(Path(f"/proc/{side.pid(container)}/root/data"))
            before = cached(files)
            side.read_all(container, "many")
            # A container shares the pages that are in memory before it reads: they count only once.
            total += cached(files) - (before if number else 0)
            if number in (0, containers - 1):
                how_many = f"{number + 1} container{'s' * bool(number)}"
                side.note_cache(how_many, total)
        side.wait_until_dropped()
        side.note_cache(f"{containers} containers, a minute later", total)
        for pair in pairs:
            side.bench.down(pair)
        side.remove("shared")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--size", type=int, default=30_000, help="bytes of a file")
    parser.add_argument(
        "--tree", type=Path, help="a folder of this machine whose files are taken instead"
    )
    parser.add_argument(
        "--collected",
        type=int,
        default=0,
        help="files of an image that is pulled and removed before each pull",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--containers", type=int, default=30)
    parser.add_argument("--large", action="store_true", help="60,000 files of 17,500 bytes")
    parser.add_argument("--tmpfs", action="store_true", help="images on a tmpfs")
    options = parser.parse_args()
    if options.large:
        options.files, options.size = 60_000, 17_500
    contents = (
        sampled(options.tree, options.files)
        if options.tree
        else made_up(options.files, options.size)
    )
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if options.tmpfs:
            subprocess.run(["mount", "-t", "tmpfs", "bench", folder], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)
        all_sides = stack.enter_context(sides(folder))
        measure(all_sides, options, contents)
        if not options.large:
            share(all_sides, options.containers)
        benches = [side.bench for side in all_sides]
        place = "a tmpfs" if options.tmpfs else "the disk"
        rows = [
            *medians([bench.samples for bench in benches], benches[0].samples, "ms"),
            *medians([bench.rates for bench in benches], benches[0].rates, ""),
        ]
        size = f"{len(contents)} files, {sum(map(len, contents)) // 1000**2} MB"
        print(
            f"{where([bench.version for bench in benches])}\n{size}, on {place}, "
            f"{options.rounds} rounds\n"
        )
        print("\n".join(table([bench.name for bench in benches], rows)))


if __name__ == "__main__":
    main()
