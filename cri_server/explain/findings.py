"""What `doctor` looks at, by the code of its finding; the finding itself says what is there, what
follows and what mends it."""

from __future__ import annotations

from cri_server.explain.model import Page

_TEXTS = {
    "addresses": ("Addresses that host-local has left", "Counted in the lease files of the node's network, ours and the reference plugin's.", "`pyrunc-cri gc` releases those of pods that are gone; else a larger range in the CNI configuration."),
    "apparmor": ("AppArmor and its parser", "The default profile is compiled by apparmor_parser and loaded with the first container that wants it.", "`apt install apparmor` (it has apparmor_parser); a profile of one's own is loaded with `apparmor_parser -r FILE`."),
    "cgroup-controllers": ("Controllers in the v2 tree", "cpu, memory and pids are needed for a pod's limits, cpuset, io and hugetlb for some.", "Boot with `systemd.unified_cgroup_hierarchy=1`; or `[cgroup] missing_controllers = \"warn\"`."),
    "cgroup-driver": ("Who manages control groups", "Where systemd runs it owns the tree: scopes below its slices. Elsewhere we write to it ourselves (cgroupfs).", "`[cgroup] driver = \"systemd\"` where systemd runs, else `\"cgroupfs\"`; `auto` chooses so."),
    "cgroup-v2": ("The v2 tree", "Containers are tracked, frozen and killed in it. On a hybrid host controllers that v1 has are not there.", "Boot with `systemd.unified_cgroup_hierarchy=1`, or `mount -t cgroup2 none /sys/fs/cgroup` where no systemd runs."),
    "cni-config": ("The network's configuration", "The lexically first *.conflist, *.conf or *.json of [network] conf_dir is the node's network. It decides also when something is wrong with it; only what is no JSON object is passed over.", "Install the cluster's network add-on, or copy the example 10-pyrunc.conflist; what is wrong with a file stands in the finding."),
    "cni-plugins": ("The network's plugins", "bridge, host-local, loopback and portmap are built in; others are executables in [network] bin_dir.", "Install the plugin's package (containernetworking-plugins), or the network add-on that brings it, into [network] bin_dir."),
    "damaged-records": ("Records that were put aside", "A server that starts does so with what it cannot read.", "Look for errors of the disk in dmesg, then remove the `*.damaged` files."),
    "descriptors": ("The limit of open files", "The server has some for each pod; shims have their own.", "`LimitNOFILE=1048576` in the unit, or `ulimit -Hn 1048576` before the server starts."),
    "doctor": ("A check that failed itself", "What it was to look at is not known; --json and a report help.", "Report it with `pyrunc-cri doctor --json`."),
    "firewall": ("nft, and chains that drop what is forwarded", "Masquerade and host ports are an nftables table of ours; another table's policy can still drop the packets.", "Accept what pods forward in the other table: `iptables -P FORWARD ACCEPT`, or a rule for the bridge."),
    "ip-forward": ("Forwarding of IPv4", "The kernel routes packets of pods only with net.ipv4.ip_forward=1.", "`sysctl -w net.ipv4.ip_forward=1`, and a file in /etc/sysctl.d."),
    "images": ("Whether images are mounted", "Tried for real, on the root directory: an EROFS index over a tar, an overlay over it, and one over that. Where it fails, [images] store = \"auto\" unpacks images.", "A kernel of Linux 6.15 or newer with EROFS, and a root directory on ext4 or xfs; nothing is wrong without."),
    "kernel-calls": ("Newer system calls", "A container's start is made of them: mounts by descriptors, clone3, pidfds.", "A newer kernel; in a container or VM the seccomp filter around this machine."),
    "kernel-version": ("The kernel's version", "Features are probed; the version only says whether anybody has tried.", "A kernel of Linux 6.1 or newer."),
    "kubelet": ("kubelet's endpoint", "Its --container-runtime-endpoint or containerRuntimeEndpoint must be our [server] listen.", "`--container-runtime-endpoint=unix:///run/pyrunc/cri.sock` for kubelet; `pyrunc-cri install-node` writes the drop-in."),
    "kubelet-cgroup-driver": ("kubelet's cgroup driver", "It makes the pods' groups, we the containers' below them: both must go the same way.", "`cgroupDriver` of kubelet's configuration and `[cgroup] driver` of ours to the same."),
    "leftover-groups": ("Cgroups of unknown containers", "Looked for by our names in the v2 tree.", "`pyrunc-cri gc`; by hand `rmdir` of the group, after `echo 1 > GROUP/cgroup.kill`."),
    "leftover-mounts": ("Mounts below our folders", "We make none there: a container's root is mounted in its own namespace.", "`umount` each, after `findmnt` has shown whose it is."),
    "leftover-names": ("Names of network namespaces without a pod", "A pod's network namespace has its name below [network] netns_dir, the sandbox's id, from RunPodSandbox to StopPodSandbox.", "`umount` and remove the name; a server that starts does so for its own."),
    "leftover-shims": ("Shims without a record", "A shim that has pods outlives the server; no server asks about a pod without a record.", "Restart the server: it ends them when it starts, and pods with a record run on."),
    "module-br-netfilter": ("Bridged packets and the firewall", "kube-proxy rewrites addresses of Services; on a bridge it sees both directions only with br_netfilter.", "`modprobe br_netfilter`, and its name in a file of /etc/modules-load.d."),
    "module-overlay": ("overlayfs", "Each container's root is an overlay of its image's layers.", "`modprobe overlay`, and its name in a file of /etc/modules-load.d."),
    "namespaces": ("Namespaces", "Pods are made of them; user namespaces are for hostUsers: false.", "A kernel with the namespaces that are named; `sysctl -w user.max_user_namespaces=15000` for user namespaces."),
    "netns-dir": ("The folder of the names of network namespaces", "Add-ons mount [network] netns_dir into their pods with HostToContainer, which needs a shared mount.", "`mount --bind DIR DIR && mount --make-shared DIR`, or leave it to systemd, which has /run shared."),
    "nft": ("The program nft", "The plugins bridge and portmap write their table with it.", "`apt install nftables`."),
    "overlay-on-root": ("An overlay on the root directory", "Tried for real: whiteouts, opaque folders, d_type. Another overlay, NFS, FAT cannot.", "Put [server] root on ext4 or xfs (ftype=1)."),
    "registries": ("Files of hosts.toml", "Those below [registry] config_path are read with their certificates, as a pull reads them. One that is wrong concerns the images of its registry only.", "Mend the file that the finding names; docs/registries.md has its form."),
    "root": ("Who looked", "Some checks are root's.", "Run `sudo pyrunc-cri doctor`."),
    "root-ext4": ("ext4 and inodes that were just deleted", "Its allocator goes around them for minutes, which costs CPU where pods come and go.", "`mkfs.xfs` a disk of its own for [server] root, on nodes where many pods come and go."),
    "root-noexec": ("noexec on the root directory", "Plugins of others execute ours from <root>/network/bin.", "`mount -o remount,exec` of the file system of [server] root."),
    "root-space": ("Space and inodes of the root directory", "Images, writable layers and records are there.", "`pyrunc-cri gc --images`, `pyrunc-cri image prune -a`; a larger disk."),
    "runtimes": ("Programs of runtime handlers", "[runtimes.NAME] names the OCI runtime of a RuntimeClass's handler; without a binary it is our own.", "Install the program, or mend `[runtimes.NAME] binary`."),
    "seccomp": ("seccomp filters", "Each sandbox and each pod with RuntimeDefault has one.", "A kernel with CONFIG_SECCOMP_FILTER."),
    "selinux": ("SELinux and its policy", "Labels of pods come from the policy's lxc_contexts; the kernel is asked whether it knows them.", "Install container-selinux, or set `[selinux] enabled = false`."),
    "server": ("Whether a server answers", "At [server] listen. Pods outlive it.", "`systemctl start pyrunc-cri`, or `pyrunc-cri serve` where no systemd runs; `--address` names another socket."),
    "state-tmpfs": ("The state directory", "Sockets and facts of this boot: they are written often, not synced, and must be gone after a restart of the machine.", "Leave [server] state below /run, or mount a tmpfs there before the server starts."),
    "swap": ("Swap", "kubelet's failSwapOn is true unless its configuration says otherwise.", "`swapoff -a`, or `failSwapOn: false` in kubelet's configuration."),
    "sysctls": ("Limits of the whole machine", "Those that nodes with many pods run into first.", "`sysctl -w NAME=VALUE` as the finding says, and a file in /etc/sysctl.d."),
}  # fmt: skip

FINDINGS = tuple(
    Page(code, "doctor", title, text, todo) for code, (title, text, todo) in sorted(_TEXTS.items())
)
