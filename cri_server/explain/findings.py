"""What `doctor` looks at, by the code of its finding; the finding itself says what is there, what follows and what mends it."""

from __future__ import annotations

from cri_server.explain.model import Page

_TEXTS = {
    "addresses": ("Addresses that host-local has left", "Counted in the lease files of the node's network, ours and the reference plugin's."),
    "apparmor": ("AppArmor and its parser", "The default profile is compiled by apparmor_parser and loaded with the first container that wants it."),
    "cgroup-controllers": ("Controllers in the v2 tree", "cpu, memory and pids are needed for a pod's limits, cpuset, io and hugetlb for some."),
    "cgroup-driver": ("Who manages control groups", "Where systemd runs it owns the tree: scopes below its slices. Elsewhere we write to it ourselves (cgroupfs)."),
    "cgroup-v2": ("The v2 tree", "Containers are tracked, frozen and killed in it. On a hybrid host controllers that v1 has are not there."),
    "cni-config": ("The network's configuration", "The lexically first *.conflist, *.conf or *.json of [network] conf_dir is the node's network. It decides also when something is wrong with it; only what is no JSON object is passed over."),
    "cni-plugins": ("The network's plugins", "bridge, host-local, loopback and portmap are built in; others are executables in [network] bin_dir."),
    "damaged-records": ("Records that were put aside", "A server that starts does so with what it cannot read."),
    "descriptors": ("The limit of open files", "The server has some for each pod; shims have their own."),
    "doctor": ("A check that failed itself", "What it was to look at is not known; --json and a report help."),
    "firewall": ("nft, and chains that drop what is forwarded", "Masquerade and host ports are an nftables table of ours; another table's policy can still drop the packets."),
    "ip-forward": ("Forwarding of IPv4", "The kernel routes packets of pods only with net.ipv4.ip_forward=1."),
    "images": ("Whether images are mounted", "Tried for real, on the root directory: an EROFS index over a tar, an overlay over it, and one over that. Where it fails, [images] store = \"auto\" unpacks images."),
    "kernel-calls": ("Newer system calls", "A container's start is made of them: mounts by descriptors, clone3, pidfds."),
    "kernel-version": ("The kernel's version", "Features are probed; the version only says whether anybody has tried."),
    "kubelet": ("kubelet's endpoint", "Its --container-runtime-endpoint or containerRuntimeEndpoint must be our [server] listen."),
    "kubelet-cgroup-driver": ("kubelet's cgroup driver", "It makes the pods' groups, we the containers' below them: both must go the same way."),
    "leftover-groups": ("Groups of containers that nobody knows", "Looked for by our names in the v2 tree."),
    "leftover-mounts": ("Mounts below our folders", "We make none there: a container's root is mounted in its own namespace."),
    "leftover-names": ("Names of network namespaces that nobody knows", "A pod's network namespace has its name below [network] netns_dir, the sandbox's id, from RunPodSandbox to StopPodSandbox."),
    "leftover-shims": ("Shims without a record", "Each pod has a shim, which outlives the server; without the pod's record nobody asks it."),
    "module-br-netfilter": ("Bridged packets and the firewall", "kube-proxy rewrites addresses of Services; on a bridge it sees both directions only with br_netfilter."),
    "module-overlay": ("overlayfs", "Each container's root is an overlay of its image's layers."),
    "namespaces": ("Namespaces", "Pods are made of them; user namespaces are for hostUsers: false."),
    "netns-dir": ("The folder of the names of network namespaces", "Add-ons mount [network] netns_dir into their pods with HostToContainer, which needs a shared mount."),
    "nft": ("The program nft", "The plugins bridge and portmap write their table with it."),
    "overlay-on-root": ("An overlay on the root directory", "Tried for real: whiteouts, opaque folders, d_type. Another overlay, NFS, FAT cannot."),
    "registries": ("Files of hosts.toml", "Those below [registry] config_path are read with their certificates, as a pull reads them. One that is wrong concerns the images of its registry only."),
    "root": ("Who looked", "Some checks are root's."),
    "root-ext4": ("ext4 and inodes that were just deleted", "Its allocator goes around them for minutes, which costs CPU where pods come and go."),
    "root-noexec": ("noexec on the root directory", "Plugins of others execute ours from <root>/network/bin."),
    "root-space": ("Space and inodes of the root directory", "Images, writable layers and records are there."),
    "runtimes": ("Programs of runtime handlers", "[runtimes.NAME] names the OCI runtime of a RuntimeClass's handler; without a binary it is our own."),
    "seccomp": ("seccomp filters", "Each sandbox and each pod with RuntimeDefault has one."),
    "selinux": ("SELinux and its policy", "Labels of pods come from the policy's lxc_contexts; the kernel is asked whether it knows them."),
    "server": ("Whether a server answers", "At [server] listen. Pods outlive it."),
    "state-tmpfs": ("The state directory", "Sockets and facts of this boot: they are written often, not synced, and must be gone after a restart of the machine."),
    "swap": ("Swap", "kubelet's failSwapOn is true unless its configuration says otherwise."),
    "sysctls": ("Limits of the whole machine", "Those that nodes with many pods run into first."),
}  # fmt: skip

FINDINGS = tuple(
    Page(code, "doctor", title, text, "`pyrunc-cri doctor` shows the command that mends it here.")
    for code, (title, text) in sorted(_TEXTS.items())
)
