"""Tests of a real kubelet under systemd, checked against the kernel's own files. They run in the
guest that `vagrant/provision.sh` made a node."""
