"""Lists which of containerd's own CRI integration tests apply to any CRI server, and why the others
do not.

All tests of the suite are listed: tests/cri/containerd/test_integration.py fails on a new one.
"""

from __future__ import annotations

from collections.abc import Mapping

ITS_CLIENT = (
    "looks into containerd's own containers, snapshots, images or events with containerd's client"
)
ITS_CONFIG = "reads containerd's own configuration from the verbose status"
ITS_RESTART = "kills and starts processes called containerd"
ITS_PROCESSES = "starts containerds of its own, or looks into its shims"
ITS_INSIDES = "calls containerd's Go code without any socket"

NOT_OURS: Mapping[str, str] = {
    "TestCRIImagePullTimeout": ITS_INSIDES,
    "TestContainerCgroupWritable": ITS_PROCESSES,
    "TestContainerIOLeakAfterStartFailed": ITS_PROCESSES,
    "TestContainerTTYLeakAfterExit": ITS_PROCESSES,
    "TestContainerdImage": ITS_CLIENT,
    "TestContainerdImageInOtherNamespaces": ITS_CLIENT,
    "TestContainerdSandboxImage": ITS_CLIENT,
    "TestContainerdSandboxImagePulledOutsideCRI": ITS_CLIENT,
    "TestContainerdRestart": ITS_RESTART,
    "TestContainerdRestartSandboxRecover": ITS_RESTART,
    "TestFailFastWhenConnectShim": ITS_INSIDES,
    "TestImageLoad": "needs docker, and containerd's ctr",
    "TestImageVolumeBasic": ITS_CLIENT,
    "TestImageVolumeCheckVolatileOption": (
        "looks for containerd's mounts on the host; ours has none there"
    ),
    "TestImageVolumeReusableAfterFailure": ITS_CLIENT,
    "TestImageVolumeSetupIfContainerdRestarts": ITS_CLIENT,
    "TestIssue10244LoopbackV2": ITS_PROCESSES,
    "TestIssue10467": "reads containerd's database",
    "TestIssue7496": ITS_PROCESSES,
    "TestIssue7496_ShouldRetryShutdown": ITS_CLIENT,
    "TestKillShimPreservesExitStatusForMultipleContainers": ITS_CLIENT,
    "TestKillShimPublishesTaskExitAndDeleteEvents": ITS_CLIENT,
    "TestKillShimPublishesTaskExitAndDeleteEventsForContainer": ITS_CLIENT,
    "TestLongContainerLog": ITS_CONFIG,
    "TestNriPluginContainerdRestart": ITS_RESTART,
    "TestOOMEventMonitor": ITS_PROCESSES,
    "TestPodSandboxController_ShouldBackoffExitEventWhenFail": ITS_CLIENT,
    "TestReload100Pods": ITS_PROCESSES,
    "TestRunContainerWithVolatileOption": (
        "looks for containerd's mounts on the host; ours has none there"
    ),
    "TestRunPodSandboxAndTeardownCNISlow": ITS_RESTART,
    "TestRunPodSandboxWithSetupCNIFailure": ITS_PROCESSES,
    "TestRunPodSandboxWithShimDeleteFailure": ITS_RESTART,
    "TestRunPodSandboxWithShimStartAndTeardownCNIFailure": ITS_RESTART,
    "TestRunPodSandboxWithShimStartFailure": ITS_PROCESSES,
    "TestRuntimeHandlerUnpackWithSnapshotLabels": ITS_PROCESSES,
    "TestSandboxRemoveWithoutIPLeakage": ITS_CONFIG,
    "TestSandboxStopWithNilCNIResult": ITS_RESTART,
    "TestShutdownShimWhenPauseExitsBeforeWorkload": ITS_CLIENT,
    "TestUpdateContainerResources_MemoryLimit": ITS_CLIENT,
    "TestUpdateContainerResources_MemorySwap": ITS_CLIENT,
    "TestUpdatePodSandboxWithRestart": ITS_RESTART,
    "TestUpgrade": ITS_PROCESSES,
}
"""Name -> why it says nothing about another server."""

DIFFERENT: Mapping[str, str] = {
    "TestContainerDrainExecIOAfterExit": (
        "containerd fails an exec whose background process keeps the output open; ours ends it with"
        " the process that was asked for"
    ),
    "TestContainerLifecycleWithoutImageRef": (
        "removes an image that a container uses; ours refuses that"
    ),
    "TestContainerStopCancellation": (
        "a caller that goes away takes containerd's SIGKILL back; ours ends what it began"
    ),
    "TestContainerStopSignals": (
        "stops the container right after its start, before its shell has set a trap: ours is there"
        " too early"
    ),
    "TestContainerSysfsStatsWithPrivilegedPod": (
        "three of four parts pass; the last compares the words of an error"
    ),
    "TestDuplicateName": (
        "the same RunPodSandbox again is an error of containerd's; with ours it is a retry and"
        " finds the pod"
    ),
    "TestTruncIndex": (
        "ContainerStats of a container that has ended is an error of containerd's; ours tells what"
        " its files take"
    ),
}
"""Name -> where containerd and ours answer differently, and both may."""

NEED_CONTROLLERS = (
    "TestContainerConsumedStats",
    "TestContainerListStats",
    "TestContainerListStatsWithIdFilter",
    "TestContainerListStatsWithIdSandboxIdFilter",
    "TestContainerListStatsWithSandboxIdFilter",
    "TestContainerStats",
    "TestNriLinuxCpusetAdjustment",
    "TestNriLinuxCpusetAdjustmentUpdate",
)
"""Those that measure memory or choose processors: they pass where cgroup v2 has these controllers.
"""

APPLY = (
    "TestAdditionalGids",
    "TestContainerEvents",
    "TestContainerLogWithoutTailingNewLine",
    "TestContainerRestart",
    "TestContainerSymlinkVolumes",
    "TestCreateContainerWithoutMetadata",
    "TestDefaultContainerStopSignal",
    "TestFailedContainerRestart",
    "TestImageFSInfo",
    "TestImageVolumeWithUserNamespace",
    "TestIssue10598",
    "TestNriAnnotationInjection",
    "TestNriEnvironmentInjection",
    "TestNriLinuxDeviceInjection",
    "TestNriLinuxMemsetAdjustment",
    "TestNriLinuxMemsetAdjustmentUpdate",
    "TestNriMountInjection",
    "TestNriPluginNetworkingLifecycle",
    "TestNriPluginNetworkingSynchronization",
    "TestNriPluginSetup",
    "TestNriPluginSynchronization",
    "TestNriUpdatePodSandbox",
    "TestPodDualStack",
    "TestPodHostname",
    "TestPodUserNS",
    "TestPrivilegedContainerCgroupMountOptions",
    "TestRunPodSandboxWithoutMetadata",
    "TestRuntimeHandler",
    "TestSharedPidMultiProcessContainerStop",
    "TestUpdateContainerResources_StatusUpdated",
    "TestUsernsVolumeCopyUp",
    "TestVolumeCopyUp",
    "TestVolumeOwnership",
)
"""Those that speak CRI, or NRI, and nothing else."""

FEWEST = 30
"""Tests that pass at least; others skip themselves for lack of a cgroup, a swap or a file system.
"""
