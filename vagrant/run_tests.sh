#!/usr/bin/env bash
# Runs the tests that need a machine of their own in the Vagrant machine: limits on pure cgroup v2,
# kubelet under systemd.
#
# usage: run_tests.sh [PYTEST ARGUMENTS]     on the host, in any folder, after `vagrant up`
# By default it runs what CI runs.
set -euo pipefail

PYTHON=/opt/venv/bin/python

main() {
  cd "$(dirname "${BASH_SOURCE[0]}")"
  [ $# -gt 0 ] || set -- -m "not slow" tests/vm/inside tests/vm/kubelet
  vagrant rsync
  exec vagrant ssh -c "sudo /opt/project/vagrant/run_tests.sh --inside $(printf '%q ' "$@")"
}

inside() { # PYTEST ARGUMENTS: in the machine, as root
  local installed folder
  cd /opt/project
  installed=$($PYTHON -Ic 'import os, pyrunc; print(os.path.dirname(pyrunc.__path__[0]))')
  # results of `make build`, for a host's checkout that has not been built
  for folder in cri_server/api pyrunc/native; do
    rsync -a --ignore-existing "$installed/$folder/" $folder
  done
  $PYTHON -c "import pytest, pytest_timeout, pytest_asyncio" 2>/dev/null \
    || $PYTHON -m pip install -q --disable-pip-version-check \
      pytest pytest-timeout pytest-asyncio hypothesis
  export CI=true PYRUNC_GUEST=1
  exec $PYTHON -m pytest -v --tb=short "$@"
}

if [ "${1:-}" = --inside ]; then
  inside "${@:2}"
else
  main "$@"
fi
