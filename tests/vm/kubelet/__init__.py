"""A real kubelet under systemd, judged by the kernel's own files. Runs in the guest that
`vagrant/provision.sh` made a node."""
