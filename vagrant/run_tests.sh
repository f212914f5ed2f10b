#!/usr/bin/env bash
# Runs the tests that need a whole machine in the Vagrant machine: limits on pure cgroup v2, kubelet under systemd.
#
# usage: run_tests.sh [PYTEST ARGUMENTS]     on the host, in any folder, after `vagrant up`; default: what CI runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if [ $# -eq 0 ]; then
  set -- -m "'not slow'" tests/vm/inside tests/vm/kubelet
fi
vagrant rsync
exec vagrant ssh -c "sudo sh -ec 'cd /opt/project
  /opt/venv/bin/python -c \"import pytest, pytest_timeout, pytest_asyncio\" 2>/dev/null \
    || /opt/venv/bin/python -m pip install -q --disable-pip-version-check pytest pytest-timeout pytest-asyncio hypothesis
  export CI=true PYRUNC_GUEST=1; exec /opt/venv/bin/python -m pytest -v --tb=short $*'"
