# The door to the project: what a person or CI runs. Everything that can be reused lives in the
# cache folder.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= /usr/bin/python3
BIN := .venv/bin
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pyrunc
API := cri_server/api/api_pb2.py cri_server/api/api_pb2_grpc.py
NRI := cri_server/api/nri_pb2.py cri_server/api/ttrpc_pb2.py

# Debian's packages: to build and run; to test.
RUN_PACKAGES := gcc libc6-dev make python3-dev python3-venv libseccomp2 nftables \
	busybox-static ca-certificates
TEST_PACKAGES := gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static qemu-system-x86 \
	qemu-system-arm mmdebstrap xz-utils e2fsprogs skopeo umoci openssh-client openssl strace \
	git iproute2 iptables conntrack procps libseccomp-dev pkg-config zstd uidmap debhelper \
	groff-base chromium-headless-shell zsh fish
# To build the package.
DEB_PACKAGES := debhelper
# $(call packages,NAMES): installs those of NAMES that are missing, and says so only then.
packages = missing=$$(for p in $(1); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | \
	grep -q '^install ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then echo "installing:" $$missing; apt-get update -qq; \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing \
	>/dev/null; fi

.PHONY: help
# A help text may continue on the next line, after a backslash.
help: ## list the targets
	@sed -zE 's/ *\\\n\s*/ /g' $(MAKEFILE_LIST) | \
		sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' | expand -t 24

.PHONY: build
# Bytecode is written here, as PYTHONDONTWRITEBYTECODE or a read-only tree would keep each start
# from it: half of its time.
build: .venv/built $(API) $(NRI) native ## compile the C programs, generate the CRI modules, \
	install into .venv
	@$(BIN)/python -m compileall -q pyrunc cri_server cni_plugins
	@$(BIN)/python -m pyrunc.cli.entry install $(BIN)

.PHONY: native
native:
	@$(MAKE) -s -C pause

.venv/built: pyproject.toml
	@$(call packages,$(RUN_PACKAGES))
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[build]'
	@touch $@

.venv/tested: .venv/built
	@$(call packages,$(TEST_PACKAGES))
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[build,test]'
# pip has put its own script there
	@$(BIN)/python -m pyrunc.cli.entry install $(BIN) >/dev/null
	@touch $@

$(API) &: proto/api.proto .venv/built
	@mkdir -p cri_server/api
	@$(BIN)/python -m grpc_tools.protoc -Icri_server/api=proto --python_out=. --pyi_out=. \
		--grpc_python_out=. cri_server/api/api.proto

$(NRI) &: proto/nri.proto proto/ttrpc.proto .venv/built
	@mkdir -p cri_server/api
	@$(BIN)/python -m grpc_tools.protoc -Icri_server/api=proto --python_out=. --pyi_out=. \
		$(NRI:_pb2.py=.proto)

# A package for the Debian that this is; SUITE=trixie or bookworm: for that one, in a chroot. It
# lies in dist/ then.
.PHONY: deb deb-here deb-chroot
deb: $(if $(SUITE),deb-chroot,deb-here) ## build the Debian package; SUITE=trixie: for another \
	Debian, in a chroot
deb-here: build
	@$(call packages,$(DEB_PACKAGES))
	@printf 'pyrunc (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- %s  %s\n' \
		"$$(debian/version.sh)" "$$(sed -n 's/^Maintainer: //p' debian/control)" \
		"$$(git log -1 --format=%cD 2>/dev/null || date -R)" >debian/changelog
	@rm -rf debian/pyrunc debian/.debhelper debian/debhelper-build-stamp
	@debian/rules binary
deb-chroot: build .venv/tested
	@$(BIN)/python -m tests.support.chroot deb $(SUITE)

.PHONY: demo
demo: build ## run pod.yaml on a temporary server, show its processes, clean up
	@$(BIN)/pyrunc-cri demo pod.yaml

.PHONY: lint
lint: build .venv/tested ## ruff and mypy
	@$(BIN)/ruff format -q --check . || { $(BIN)/ruff format --diff -q . | head -40; exit 1; }
	@$(BIN)/ruff check -q .
	@$(BIN)/mypy

# PYTEST holds more arguments, such as PYTEST='-k shim'. Two workers; tests/support/schedule.py says
# which runs what.
.PHONY: test
test: lint ## all that CI runs: lint, unit, kernel, CRI, Kubernetes, guest
	@$(BIN)/python -m pytest -n 2 --max-worker-restart=0 -m 'not slow' $(PYTEST)

.PHONY: test-all test-slow
test-all: test test-slow ## what CI runs and what takes too long for it
test-slow: build .venv/tested ## what takes too long for CI, Kubernetes' own suites among it: \
	more than an hour
	@$(BIN)/python -m pytest -m slow $(PYTEST)
	@PYRUNC_TESTS_IMAGE_STORE=unpacked $(BIN)/python -m pytest -m 'not slow' \
		tests/kube $(PYTEST)

.PHONY: clean
clean: ## remove what was built here; the cache stays
	rm -rf .venv build dist *.egg-info pause/build pyrunc/native/launcher pyrunc/native/pause \
		pyrunc/native/keeper pyrunc/native/pyrunc-* cri_server/api/*_pb2*

.PHONY: kube kube-down
kube: build .venv/tested ## build Kubernetes, start a one-node cluster on our server; \
	`make kube-down` ends it
	@$(BIN)/python -m tests.support.cluster up $(CACHE)/kube-node
kube-down:
	@$(BIN)/python -m tests.support.cluster down $(CACHE)/kube-node

# FOCUS holds a regular expression for names of specs, PARALLEL how many run at a time, RESULTS
# where the report goes.
PARALLEL ?= 4
RESULTS ?= build/conformance
.PHONY: conformance
conformance: build .venv/tested ## Kubernetes' conformance suite on a cluster of two nodes; \
	FOCUS='sig-network' PARALLEL=4
	@$(BIN)/python -m tests.kube_conformance $(RESULTS) --parallel $(PARALLEL) \
		--focus '$(FOCUS)' $(CONFORMANCE)

.PHONY: vm vm-down test-vm
vm: build .venv/tested ## build and boot the guest with pure cgroup v2 and systemd; \
	`make vm-down` ends it
	@$(BIN)/python -m tests.support.guest start
vm-down:
	@$(BIN)/python -m tests.support.guest stop
test-vm: build .venv/tested ## the tests that run in the guest; PYTEST="-m ''" for the slow ones too
	@$(BIN)/python -m pytest -m 'not slow' tests/vm $(PYTEST)

.PHONY: bench
bench: build .venv/tested ## compare with containerd + runc and CRI-O + crun in one run, and \
	the gRPC server with grpcio's
	@$(BIN)/python -m tests.bench.compare $(BENCH)
	@$(BIN)/python -m tests.bench.transport

.PHONY: bench-kubelet
bench-kubelet: build .venv/tested ## 40 pods posted at once to a real kubelet on each of the \
	three; BENCH='--pods 40 --rounds 3'
	@$(BIN)/python -m tests.bench.kubelet $(BENCH)

.PHONY: figures
figures: .venv/tested ## put the results of bench and bench-kubelet, in build/figures, into the \
	README and its chart
	@$(BIN)/python -m tests.bench.figures

.PHONY: bench-images
bench-images: build .venv/tested ## compare images with containerd's: pull, first start, \
	removal, disk, page cache; BENCH='--tmpfs'
	@$(BIN)/python -m tests.bench.pulls $(BENCH)

N ?= 150
.PHONY: bench-pods
bench-pods: build .venv/tested ## N=150 idle pods on containerd and on ours: lists, \
	statistics, memory, probes, a killed server
	@$(BIN)/python -m tests.bench.pods $(N)

.PHONY: bench-runtimes
bench-runtimes: build .venv/tested ## compare pyrunc with runc and crun, command by command
	@$(BIN)/python -m tests.bench.runtimes $(BENCH)
