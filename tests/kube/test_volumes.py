"""Tests volumes: ConfigMaps, Secrets, service account tokens, emptyDir, hostPath, sub-paths."""

from __future__ import annotations

from tests.kube.pods import Kube, pod, shell


def test_volumes_of_objects_have_their_content_and_sub_paths(kube: Kube) -> None:
    kube("create", "configmap", "conf", "--from-literal=key=value", "--from-literal=other=thing")
    kube("create", "secret", "generic", "hidden", "--from-literal=word=pass")
    volumes = [
        {"name": "conf", "configMap": {"name": "conf"}},
        {"name": "hidden", "secret": {"secretName": "hidden", "defaultMode": 0o400}},
        {
            "name": "both",
            "projected": {
                "sources": [
                    {"configMap": {"name": "conf"}},
                    {"secret": {"name": "hidden"}},
                    {
                        "downwardAPI": {
                            "items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]
                        }
                    },
                ]
            },
        },
    ]
    mounts = [
        {"name": "conf", "mountPath": "/conf"},
        {"name": "hidden", "mountPath": "/hidden", "readOnly": True},
        {"name": "both", "mountPath": "/both"},
        {"name": "conf", "mountPath": "/etc/one-file", "subPath": "key"},
    ]
    env = [{"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "hidden", "key": "word"}}}]
    kube.run(pod("p", shell("sleep 3600", volumeMounts=mounts, env=env), volumes=volumes))
    assert kube.sh(
        "p",
        "cat /conf/key /hidden/word /both/other /both/word /both/name /etc/one-file; echo $WORD",
    ) == ("valuepassthingpasspvaluepass")
    assert "read-only" in kube.exec("p", "touch", "/hidden/x", check=False).stderr.lower()


def test_the_service_account_token_is_there(kube: Kube) -> None:
    kube.run(pod("p", automountServiceAccountToken=True))
    token = kube.sh("p", "cat /var/run/secrets/kubernetes.io/serviceaccount/token")
    assert token.count(".") == 2
    assert (
        kube.sh("p", "cat /var/run/secrets/kubernetes.io/serviceaccount/namespace")
        == kube.namespace
    )


def test_empty_dirs_are_shared_by_the_pod(kube: Kube) -> None:
    volumes = [
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
    ]
    mounts = {
        "volumeMounts": [
            {"name": "disk", "mountPath": "/disk"},
            {"name": "memory", "mountPath": "/memory"},
        ]
    }
    kube.run(
        pod("p", shell("sleep 3600", **mounts), shell("sleep 3600", **mounts), volumes=volumes)
    )
    kube.sh("p", "echo a >/disk/a; echo b >/memory/b")
    assert kube.sh("p", "cat /disk/a /memory/b", container="c2") == "a\nb"
    assert kube.sh("p", "stat -f -c %T /memory") == "tmpfs"


def test_host_paths_are_mounted_with_their_propagation(kube: Kube) -> None:
    folder = kube.cluster.folder / "host-path"
    folder.mkdir(exist_ok=True)
    (folder / "file").write_text("from the host\n")
    volumes = [
        {"name": "h", "hostPath": {"path": str(folder)}},
        {"name": "f", "hostPath": {"path": str(folder / "file"), "type": "File"}},
    ]
    mounts = [
        {"name": "h", "mountPath": "/h"},
        {"name": "f", "mountPath": "/etc/the-file", "readOnly": True},
    ]
    kube.run(pod("p", shell("sleep 3600", volumeMounts=mounts), volumes=volumes))
    assert (
        kube.sh("p", "cat /h/file /etc/the-file; echo back >/h/back")
        == "from the host\nfrom the host"
    )
    assert (folder / "back").read_text() == "back\n"
    assert kube.exec("p", "sh", "-c", "echo x >/etc/the-file", check=False).returncode != 0


def test_a_sub_path_of_an_empty_dir_is_mounted(kube: Kube) -> None:
    volumes = [{"name": "v", "emptyDir": {}}]
    mounts = [
        {"name": "v", "mountPath": "/all"},
        {"name": "v", "mountPath": "/part", "subPath": "deep/inside"},
    ]
    kube.run(pod("p", shell("sleep 3600", volumeMounts=mounts), volumes=volumes))
    assert kube.sh("p", "echo x >/part/x; cat /all/deep/inside/x") == "x"
