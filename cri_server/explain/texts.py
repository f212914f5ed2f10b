"""Texts that people meet in `kubectl describe pod`, in a client's output or in a log, and what is
behind them."""

from __future__ import annotations

from cri_server.explain.model import Page

TEXTS = (
    Page(
        "no-server", "texts", "No server listens at this socket",
        "The socket's file is missing, or left by a server that has ended. kubelet says `connect: no such file or directory` or `connection refused` of the same.",
        "`systemctl start pyrunc-cri`, or without systemd `pyrunc-cri serve`; for a socket elsewhere `--address` or $PYRUNC_CRI_ADDRESS.",
        patterns=(r"no server at ", r"\.sock: connect: (connection refused|no such file)"),
    ),
    Page(
        "socket-permission", "texts", "The socket is not for this user",
        "Who may connect can run anything as root on this machine: the socket belongs to root and the group of [server] socket_gid.",
        "Use sudo, or put the user into that group.",
        patterns=(r"no access to ", r"\.sock: connect: permission denied"),
    ),
    Page(
        "host-port-taken", "texts", "Another pod has this host port",
        "A port of the node leads to one pod only. The text names its owner.",
        "Give one of the two another hostPort, or remove the other pod: `pyrunc-cri pods`. A process of the node itself: `ss -ltnp`.",
        patterns=(r"host port .* is already taken", r"address already in use", r"hostPort.*(taken|in use)"),
    ),
    Page(
        "no-command", "texts", "The image does not have this program",
        "The first word of command is no file in the image, or none in the directories of $PATH there. Images without a shell have no sh.",
        "`pyrunc-cri inspecti IMAGE` shows the image's own entrypoint; write the program's whole path, or take another image.",
        patterns=(r"executable file not found", r"exec: .*no such file or directory"),
    ),
    Page(
        "arguments-too-long", "texts", "Arguments and environment are longer than the kernel takes",
        "One string may have 128 KiB, all together a quarter of the stack limit, 2 MiB on most nodes. kubelet adds seven variables for each service of the pod's namespace: some thousands of services are too many.",
        "With many services `enableServiceLinks: false` in the pod's spec. A long variable or script: mount it as a file (ConfigMap, Secret); the message names it.",
        patterns=(r"[Aa]rgument list too long", r"E2BIG"),
    ),
    Page(
        "network-not-ready", "texts", "The node has no network for pods yet",
        "Pods cannot get an address: there is no usable file in [network] conf_dir. kubelet sets the node NotReady for it.",
        "Install the cluster's network add-on (flannel, Calico, Cilium, …), or set [network] builtin; `pyrunc-cri doctor` shows what is wrong with a file.",
        patterns=(r"NetworkPluginNotReady", r"cni plugin not initialized", r"network plugin is not ready", r"NetworkReady.?=.?false"),
    ),
    Page(
        "no-address", "texts", "The network has no address left",
        "host-local counts a lease for each pod; leases of pods that were lost stay until they are collected.",
        "`pyrunc-cri gc`, then more or larger ranges in the CNI configuration, or fewer pods on this node.",
        patterns=(r"no IP addresses available", r"(addresses|range set) .*(used up|exhausted)"),
    ),
    Page(
        "registry-certificate", "texts", "The registry's certificate is not trusted",
        "It is signed by an authority that this node does not know, for another name, or expired; or the node's clock is wrong.",
        "`ca = \"/PATH\"` in hosts.toml of this registry, or the authority in /etc/ssl/certs; `openssl s_client -connect HOST:443 -servername HOST`; `date`.",
        patterns=(r"certificate verify failed", r"x509: ", r"certificate signed by unknown authority", r"self.signed certificate"),
    ),
    Page(
        "registry-speaks-http", "texts", "The registry speaks HTTP, and was asked by HTTPS",
        "Registries are asked by HTTPS unless they are on loopback or their file says http://.",
        "In hosts.toml of this registry: `server = \"http://HOST:PORT\"`. Better: give the registry a certificate.",
        patterns=(r"wrong.version.number", r"HTTP response to HTTPS client", r"record layer failure", r"speaks HTTP"),
    ),
    Page(
        "registry-limit", "texts", "The registry lets this address pull no more for now",
        "429, as Docker Hub answers anonymous users. Pulls of what is here already do not count.",
        "Log in (imagePullSecrets, `pyrunc-cri login`), or put a mirror before it in hosts.toml.",
        patterns=(r"toomanyrequests", r"429", r"[Rr]ate limit"),
    ),
    Page(
        "name-not-resolved", "texts", "A host's name has no address",
        "The node's resolver does not know it; pods have their own resolver.",
        "`getent hosts HOST` on the node, /etc/resolv.conf; a typing error in the image's name looks the same.",
        patterns=(r"[Nn]ame or service not known", r"[Nn]ame resolution", r"no such host", r"does not resolve"),
    ),
    Page(
        "pull-backoff", "texts", "kubelet waits before it pulls again",
        "ErrImagePull: a pull has failed; ImagePullBackOff: it will be tried again later. The reason is in the event before.",
        "`kubectl describe pod` for that reason, and explain it; on the node `pyrunc-cri pull IMAGE`.",
        also=("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull"),
    ),
    Page(
        "crash-loop", "texts", "The container ends again and again",
        "kubelet waits longer before each start. The runtime has started it each time: its program ends.",
        "`kubectl logs --previous POD`, `pyrunc-cri logs -p POD/NAME`; the exit code is in `pyrunc-cri ps -a`.",
        also=("CrashLoopBackOff",),
    ),
    Page(
        "create-failed", "texts", "The runtime refused to create or start a container",
        "The message behind it is the runtime's own.",
        "Explain that message; `pyrunc-cri timeline POD` shows the step that failed.",
        also=("CreateContainerError", "RunContainerError", "CreateContainerConfigError"),
    ),
    Page(
        "sandbox-failed", "texts", "The pod itself could not be set up",
        "Mostly its network: a CNI plugin's error stands behind it.",
        "Explain the rest of the message; `pyrunc-cri timeline POD`, and the log of the network add-on.",
        also=("FailedCreatePodSandBox", "CreatePodSandboxError", "KillPodSandboxError"),
        patterns=(r"CNI (ADD|DEL|CHECK) failed", r"failed to (setup|create) (network|pod sandbox)"),
    ),
    Page(
        "no-platform", "texts", "The image is not built for this processor",
        "The index has entries for other architectures only; the message lists them.",
        "Build it for this platform (`docker buildx --platform`), or take a tag that has it.",
        patterns=(r"no (match|image|manifest) .*platform", r"[Pp]latform .*not"),
    ),
    Page(
        "missing-controller", "texts", "A limit needs a cgroup controller that the v2 tree lacks",
        "The controller sits on cgroup v1, or the kernel does not have it.",
        "Boot with systemd.unified_cgroup_hierarchy=1; or [cgroup] missing_controllers = \"warn\" to run without that limit.",
        patterns=(r"missing_controllers", r"controller .*(not|missing)", r"cannot set (cpu|memory|pids|io|cpuset)\."),
    ),
    Page(
        "pod-stopped", "texts", "The pod was stopped, and nothing can start in it",
        "CRI starts no container in a sandbox that was stopped.",
        "`pyrunc-cri start POD` makes another attempt of it; kubelet does so for its own.",
        patterns=(r"sandbox .* is not ready", r"its pod .* is stopped"),
    ),
    Page(
        "killed", "texts", "The process was killed by SIGKILL",
        "Exit code 137 is 128 + 9: the OOM killer, a stop whose grace period was over, or a failed liveness probe.",
        "`pyrunc-cri inspect` has the reason (OOMKilled?); `pyrunc-cri timeline POD` shows who stopped it.",
        patterns=(r"exit(ed)?( with)?( status| code)? ?\(?137", r"signal: killed"),
    ),
)  # fmt: skip
