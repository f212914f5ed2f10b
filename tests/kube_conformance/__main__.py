"""`make conformance`: runs Kubernetes' conformance suite on a cluster of ours.

`python -m tests.kube_conformance RESULTS [--focus REGEX] [--parallel N] [--timeout SECONDS]` starts
the cluster, runs all specs or those that `--focus` matches, and prints the summary. RESULTS gets
the suite's report: `e2e.log` and `junit_01.xml`. The exit code is 1 when a spec failed or was not
run.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.kube_conformance import cluster, suite


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kube_conformance")
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--focus", default="", help="only specs whose names this regular expression finds"
    )
    parser.add_argument(
        "--parallel", type=int, default=4, help="specs at a time; the serial ones come last"
    )
    parser.add_argument("--timeout", type=int, default=6 * 3600, help="seconds for all of them")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: Path = options.results.absolute()
    shutil.rmtree(results, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix="pyrunc-conformance-", ignore_cleanup_errors=True
    ) as folder:
        try:
            with cluster.running(Path(folder) / "cluster") as running:
                print(f"cluster ready; the log is {results}/{suite.LOG}", flush=True)
                result = suite.run(
                    suite.on_this_machine(running),
                    results,
                    options.focus,
                    options.parallel,
                    options.timeout,
                )
        finally:
            _keep_logs(Path(folder), results)
    print(result.text())
    print(f"report: {results}/{suite.LOG}, {results}/{suite.JUNIT}")
    sys.exit(1 if result.failed or result.not_run else 0)


def _keep_logs(folder: Path, results: Path) -> None:
    """Copy the logs of the cluster's programs into `results`, each node's into its own folder."""
    for log in folder.glob("**/log/*.log"):
        target = results / "logs" / log.parent.parent.name / log.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, target)


if __name__ == "__main__":
    main()
