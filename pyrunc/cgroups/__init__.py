"""The container's control group: its name, its limits, its device filter, its numbers, its end.

`naming.place` turns a `cgroupsPath` into a `group.Cgroup`, touching nothing; `Cgroup` has one
method per thing that can be done with it. Conversions from OCI resources are pure (`convert`,
`scope_properties`, `device_filter`).
"""
