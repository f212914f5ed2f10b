"""A container's cgroup: its name, limits, device filter, statistics and removal.

`naming.place` converts a `cgroupsPath` to a `group.Cgroup` without touching the file system.
`Cgroup` has one method for each operation. Conversions from OCI resources do no I/O (`convert`,
`scope_properties`, `device_filter`).
"""
