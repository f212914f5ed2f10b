"""A container's control group: its name, limits, device filter, statistics and removal.

`naming.place` turns a `cgroupsPath` into a `group.Cgroup`, touching nothing; `Cgroup` has one
method per operation. Conversions from OCI resources are pure (`convert`, `scope_properties`,
`device_filter`).
"""
