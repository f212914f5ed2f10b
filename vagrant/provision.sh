#!/usr/bin/env bash
# Turns a Debian 12 or 13 machine into a one-node Kubernetes on our CRI server: packages, the
# project, a control plane, kubelet. With API_SERVER it becomes another node of the cluster whose
# control plane has that address.
#
# usage: provision.sh [FOLDER]      as root; may be repeated
#
# FOLDER holds parts that were built elsewhere, each of them optional: packages/*.deb, wheels/*.whl,
# bin/ (etcd, kubectl, kubelet, kube-apiserver, kube-controller-manager, kube-scheduler; or a disk
# labelled `kubernetes` with these), images/*.tar, pki/ca.crt and pki/ca.key (one authority for
# several nodes). The script fetches or builds the rest.
#
# NODE is the node's name (node1), NODE_ADDRESS its address where the machine has several.
# CGROUP_DRIVER is systemd (default) or cgroupfs. POD_NETWORK is bridge (default) or none: then an
# add-on such as flannel writes the CNI configuration.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PROJECT=$(dirname "$HERE")
GIVEN=$(realpath -m "${1:-$HERE/.given}")
VENV=/opt/venv
BIN=/opt/kubernetes/bin
ETC=/etc/kubernetes
NODE=${NODE:-node1}
API_SERVER=${API_SERVER:-}
CGROUP_DRIVER=${CGROUP_DRIVER:-systemd}
POD_NETWORK=${POD_NETWORK:-bridge}
PACKAGES=(
  python3 python3-venv libseccomp2 nftables iptables conntrack iproute2 procps openssl
  ca-certificates apparmor busybox-static
)
BUILD_PACKAGES=(gcc make git libc6-dev python3-dev)
CONTROL_PLANE=(etcd kube-apiserver kube-controller-manager kube-scheduler)
PROGRAMS=("${CONTROL_PLANE[@]}" kubelet kubectl)

main() {
  step packages install_packages "${PACKAGES[@]}"
  step kernel configure_kernel
  step project install_project
  step Kubernetes install_kubernetes
  step certificates make_certificates
  step configuration write_configuration
  step units write_units
  step "CRI server" start_server
  step images load_images
  [ -n "$API_SERVER" ] || step "control plane" start_control_plane
  step kubelet start_kubelet
  echo "provision: $NODE is ready; try: $BIN/kubectl --kubeconfig $ETC/admin.conf get nodes -o wide"
}

step() { # NAME COMMAND...: prints COMMAND's duration; `set -e` ends the script when it fails
  local from=$SECONDS
  # shellcheck disable=SC2064 # the present name is meant
  trap "echo 'provision: $1 failed' >&2" EXIT
  "${@:2}"
  trap - EXIT
  echo "provision: $1 ($((SECONDS - from)) s)"
}

install_packages() {
  local missing
  missing=$(missing_packages "$@")
  if [ -n "$missing" ] && compgen -G "$GIVEN/packages/*.deb" >/dev/null; then
    dpkg -i --skip-same-version "$GIVEN"/packages/*.deb >/dev/null
    missing=$(missing_packages "$@")
  fi
  [ -n "$missing" ] || return 0
  apt-get update -qq
  # shellcheck disable=SC2086 # a list of names
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

missing_packages() {
  local name
  for name; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null)" = installed ] \
      || printf '%s ' "$name"
  done
}

configure_kernel() {
  printf '%s\n' overlay br_netfilter nf_conntrack veth bridge >/etc/modules-load.d/pyrunc.conf
  printf '%s\n' net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1 vm.nr_hugepages=16 \
    >/etc/sysctl.d/90-pyrunc.conf
  systemctl restart systemd-modules-load
  sysctl -q -p /etc/sysctl.d/90-pyrunc.conf
}

install_project() {
  local wheel wheels=$GIVEN/wheels options=()
  [ -x $VENV/bin/python ] || python3 -m venv $VENV
  compgen -G "$wheels/pyrunc-*.whl" >/dev/null || {
    build_wheel
    wheels=/opt/build/wheels
  }
  wheel=$(ls -t "$wheels"/pyrunc-*.whl | head -n 1)
  if compgen -G "$VENV/lib/python3*/site-packages/pyrunc-*.dist-info" >/dev/null; then
    options=(--force-reinstall --no-deps)
  fi
  if ! pip_install --no-index "${options[@]}" "$wheel" 2>/dev/null; then
    install_packages "${BUILD_PACKAGES[@]}"
    pip_install "${options[@]}" "$wheel"
  fi
  # pip has put its own script there
  $VENV/bin/python -I -m pyrunc.cli.entry install $VENV/bin >/dev/null
  ln -sf $VENV/bin/pyrunc-cri $VENV/bin/pyrunc /usr/local/bin/
}

pip_install() {
  $VENV/bin/python -m pip install -q --disable-pip-version-check --no-compile \
    --find-links "$GIVEN/wheels" "$@"
}

build_wheel() { # in a copy: the checkout may be a read-only share
  install_packages "${BUILD_PACKAGES[@]}"
  rm -rf /opt/build && mkdir -p /opt/build
  tar -C "$PROJECT" --exclude=./.git --exclude=./.venv --exclude="./vagrant" -cf - . \
    | tar -C /opt/build -xf -
  make -C /opt/build build
  /opt/build/.venv/bin/python -m pip wheel -q --no-deps -w /opt/build/wheels /opt/build
}

install_kubernetes() {
  local name from=$GIVEN/bin disk=/dev/disk/by-label/kubernetes
  if [ -b $disk ]; then
    from=/opt/kubernetes/disk
    mkdir -p $from
    mountpoint -q $from || mount -o ro $disk $from
  fi
  for name in "${PROGRAMS[@]}"; do
    [ -x "$from/$name" ] || from=$(build_kubernetes)
  done
  mkdir -p $BIN
  for name in "${PROGRAMS[@]}"; do ln -sfn "$from/$name" $BIN/"$name"; done
}

build_kubernetes() { # from its Go module; the last line is the folder
  install_packages "${BUILD_PACKAGES[@]}" >&2
  (cd "$PROJECT" && $VENV/bin/python -m tests.support.toolchain kubernetes) | tail -n 1
}

make_certificates() {
  local pki=$ETC/pki
  [ ! -f $pki/done ] || return 0
  mkdir -p $pki
  openssl genrsa -out $pki/sa.key 2048 2>/dev/null
  openssl rsa -in $pki/sa.key -pubout -out $pki/sa.pub 2>/dev/null
  if [ -f "$GIVEN/pki/ca.key" ]; then
    cp "$GIVEN/pki/ca.crt" "$GIVEN/pki/ca.key" $pki
  else
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout $pki/ca.key \
      -out $pki/ca.crt -days 3650 -subj /CN=ca \
      -addext keyUsage=critical,keyCertSign,cRLSign 2>/dev/null
  fi
  certificate apiserver /CN=kube-apiserver
  certificate admin /O=system:masters/CN=admin
  certificate node /O=system:masters/CN=system:node:$NODE
  touch $pki/done
}

certificate() { # NAME SUBJECT
  local pki=$ETC/pki names="subjectAltName=IP:127.0.0.1,IP:10.96.0.1,IP:$(node_address)"
  names+=,DNS:localhost,DNS:kubernetes.default,DNS:$NODE
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "$pki/$1.key" \
    -out "$pki/$1.csr" -subj "$2" 2>/dev/null
  openssl x509 -req -in "$pki/$1.csr" -CA $pki/ca.crt -CAkey $pki/ca.key -CAcreateserial \
    -days 3650 -out "$pki/$1.crt" -extfile <(
      printf '%s\n' "$names" authorityKeyIdentifier=keyid keyUsage=digitalSignature
    ) 2>/dev/null
  cat >"$ETC/$1.conf" <<K
apiVersion: v1
kind: Config
clusters:
- name: here
  cluster: {server: "https://${API_SERVER:-127.0.0.1}:6443", certificate-authority: $pki/ca.crt}
users: [{name: $1, user: {client-certificate: $pki/$1.crt, client-key: $pki/$1.key}}]
contexts: [{name: here, context: {cluster: here, user: $1}}]
current-context: here
K
}

node_address() {
  local found
  found=$(ip -4 -o address show scope global | awk '{sub("/.*", "", $4); print $4; exit}')
  echo "${NODE_ADDRESS:-${found:?the machine has no address}}"
}

# GOMAXPROCS and GOGC: Go's idle threads and collector take a third of a one-node control plane's
# CPU.
write_configuration() {
  mkdir -p /etc/pyrunc /etc/cni/net.d $ETC/kubelet.conf.d
  printf '[cgroup]\ndriver = "%s"\nmissing_controllers = "error"\n' "$CGROUP_DRIVER" \
    >/etc/pyrunc/config.toml
  [ "$POD_NETWORK" = none ] || write_bridge_network
  cat >$ETC/kubelet.yaml <<K
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix:///run/pyrunc/cri.sock
cgroupDriver: $CGROUP_DRIVER
cgroupsPerQOS: true
enforceNodeAllocatable: [pods]
systemReserved: {cpu: 200m, memory: 512Mi}
podPidsLimit: 512
volumeStatsAggPeriod: 10s
failSwapOn: false
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: false}
  x509: {clientCAFile: $ETC/pki/ca.crt}
authorization: {mode: AlwaysAllow}
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
makeIPTablesUtilChains: false
staticPodPath: $ETC/manifests
K
  mkdir -p $ETC/manifests
  printf '%s\n' "NODE_ADDRESS=$(node_address)" NODE=$NODE GOMAXPROCS=1 GOGC=400 >$ETC/node.env
}

write_bridge_network() { # for one node; the controllers give node1 the same range
  cat >/etc/cni/net.d/10-pyrunc.conflist <<J
{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "pods0", "isDefaultGateway": true, "ipMasq": true,
   "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
J
}

write_units() {
  install -m 0644 "$HERE"/units/*.service /etc/systemd/system/
  sed "s|@PROGRAM@|/usr/local/bin/pyrunc-cri|" \
    "$PROJECT/cri_server/install/data/pyrunc-cri.service" \
    >/etc/systemd/system/pyrunc-cri.service
  local control_plane=("${CONTROL_PLANE[@]}")
  [ -z "$API_SERVER" ] || control_plane=()
  systemctl enable -q "${control_plane[@]}" pyrunc-cri kubelet # reloads, too
}

start_control_plane() { # each is Type=notify; the clients of the API server start after it
  systemctl restart etcd kube-apiserver
  systemctl restart kube-controller-manager kube-scheduler
}

# Returns when the server is READY. Compiles first, so that the server's helpers import faster.
start_server() {
  $VENV/bin/python -m compileall -q $VENV/lib/python3*/site-packages/{pyrunc,cri_server,cni_plugins}
  systemctl restart pyrunc-cri
}

load_images() {
  local archive
  for archive in "$GIVEN"/images/*.tar; do
    [ ! -f "$archive" ] || pyrunc-cri image load "$archive"
  done
}

start_kubelet() {
  local until=$((SECONDS + 300))
  systemctl restart kubelet
  until node_is_ready 2>/dev/null; do # on a slow machine the API server may start twice
    if [ $SECONDS -gt $until ]; then
      node_is_ready || journalctl --no-pager -n 40 -o cat -p warning -u etcd -u 'kube*' \
        -u pyrunc-cri | cut -c 1-300 >&2
      return 1
    fi
    sleep 1
  done
}

node_is_ready() {
  local kubectl=("$BIN/kubectl" --kubeconfig $ETC/admin.conf)
  "${kubectl[@]}" wait --for=create "node/$NODE" --timeout=60s || return 1
  [ "$POD_NETWORK" = none ] || "${kubectl[@]}" wait --for=condition=Ready "node/$NODE" --timeout=60s
}

main
