"""Tests hosts.toml: which file is read, how, and which content is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from cri_server.images.model import Auth
from cri_server.images.registry.hosts import PULL, RESOLVE, RegistryHost, hosts_for, read_file
from pyrunc.errors import InvalidSpec


def write(certs_dir: Path, folder: str, text: str) -> Path:
    path = certs_dir / folder / "hosts.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("domain", "url"),
    [
        ("docker.io", "https://registry-1.docker.io"),
        ("registry.k8s.io", "https://registry.k8s.io"),
        ("host:5000", "https://host:5000"),
        ("localhost", "http://localhost"),
        ("localhost:5000", "http://localhost:5000"),
        ("127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("127.9.9.9", "http://127.9.9.9"),
        ("[::1]:5000", "http://[::1]:5000"),
        ("localhost:443", "https://localhost:443"),
        ("127.0.0.1.example", "https://127.0.0.1.example"),
    ],
)
def test_a_registry_without_configuration_has_the_defaults(domain: str, url: str) -> None:
    assert hosts_for(domain, []) == [RegistryHost(url, upstream=True)]


def test_the_folder_of_a_registry_is_found_in_the_order_of_containerd(tmp_path: Path) -> None:
    """The order is HOST_PORT_, HOST:PORT, _default."""
    urls = {"_default": "https://d", "host:5000": "https://c", "host_5000_": "https://u"}
    for folder in ("_default", "host:5000", "host_5000_"):
        write(tmp_path, folder, f'server = "{urls[folder]}"')
        assert hosts_for("host:5000", [tmp_path])[-1].url == urls[folder]
    assert hosts_for("elsewhere", [tmp_path])[-1].url == "https://d"


@pytest.mark.parametrize(
    ("folder", "domains"),
    [
        ("r.example", ["R.example", "r.example:443"]),
        ("R.example_443_", ["r.example", "r.example:443"]),
        ("r.example:443", ["r.example"]),
        ("docker.io", ["index.docker.io", "registry-1.docker.io:443"]),
        ("registry-1.docker.io", ["docker.io"]),
        ("127.0.0.1_5000_", ["127.1:5000"]),
    ],
)
def test_a_folder_is_for_all_spellings_of_its_registry(
    tmp_path: Path, folder: str, domains: list[str]
) -> None:
    write(tmp_path, folder, 'server = "https://own.example"')
    for domain in domains:
        assert hosts_for(domain, [tmp_path])[-1].url == "https://own.example"
    assert hosts_for("other.example:443", [tmp_path])[-1].url == "https://other.example"


def test_every_key_of_a_file_is_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        "docker.io",
        """
server = "https://upstream.example"
ca = "/etc/ca.pem"
[host."https://mirror.example:8443/some/path"]
capabilities = ["pull", "resolve", "push"]
ca = ["a.pem", "/b.pem"]
client = [["c.pem", "c.key"], ["d.pem"]]
skip_verify = true
dial_timeout = "1m0.5s"
[host."https://mirror.example:8443/some/path".header]
X-One = "1"
X-Many = ["2", "3"]
[host."http://exact.example/v2/project"]
override_path = true
capabilities = ["pull"]
[host."bare.example"]
client = "both.pem"
[host."https://has.example/v2/"]
""",
    )
    folder = f"{tmp_path}/docker.io"
    first, exact, bare, has, upstream = hosts_for("docker.io", [tmp_path])
    assert (first.url, first.prefix, first.netloc) == (
        "https://mirror.example:8443",
        "/some/path/v2",
        "mirror.example:8443",
    )
    assert first.ca == (f"{folder}/a.pem", "/b.pem") and first.skip_verify
    assert (first.dial_timeout_s, exact.dial_timeout_s) == (60.5, 30)
    assert first.client == ((f"{folder}/c.pem", f"{folder}/c.key"), (f"{folder}/d.pem", None))
    assert first.headers == {"X-One": ["1"], "X-Many": ["2", "3"]} and "X-One" not in repr(first)
    assert (exact.prefix, exact.can(PULL), exact.can(RESOLVE)) == ("/v2/project", True, False)
    assert (bare.url, bare.prefix, bare.client) == (
        "https://bare.example",
        "/v2",
        ((f"{folder}/both.pem", None),),
    )
    assert has.prefix == "/v2" and not has.upstream
    assert (upstream.url, upstream.ca, upstream.upstream) == (
        "https://upstream.example",
        ("/etc/ca.pem",),
        True,
    )


def test_a_host_table_for_the_server_itself_has_its_settings(tmp_path: Path) -> None:
    write(
        tmp_path,
        "r.example",
        'server = "https://r.example"\n[host."https://r.example"]\nskip_verify = true\n',
    )
    [only] = hosts_for("r.example", [tmp_path])
    assert only.upstream and only.skip_verify


def test_a_folder_may_contain_only_certificates(tmp_path: Path) -> None:
    (tmp_path / "r.example").mkdir()
    for name in ("b.crt", "a.crt", "client.cert", "client.key"):
        (tmp_path / "r.example" / name).touch()
    [host] = hosts_for("r.example", [tmp_path])
    folder = f"{tmp_path}/r.example"
    assert host.ca == (f"{folder}/a.crt", f"{folder}/b.crt")
    assert host.client == ((f"{folder}/client.cert", f"{folder}/client.key"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server = 5", "server"),
        ("[host.'https://a']\nskip_verify = 'yes'", "host.'https://a'"),
        ("[host.'https://a']\nauth = 'u:p'", "host.'https://a'"),
        ("host = 'https://a'", "host"),
        ("[host.'https://a:port']", "not an http or https URL"),
        ("[host.'https://a']\nproxy = 'ftp://p'", "host.'https://a'.proxy"),
        ("[host.'https://a']\nproxy = 'http://p/path'", "has no path"),
        ("[host.'https://a']\nclient = [['', 'k.pem']]", "pair"),
        ("[host.'ftp://a']", "not an http or https URL"),
        ("[host.'https://u:p@a']", "not an http or https URL"),
        ("[host.'https://a?x=1']", "not an http or https URL"),
        ("[host.'https://a']\ncapabilities = ['fly']", "fly"),
        ("[host.'https://a']\nclient = [['a', 'b', 'c']]", "pair"),
        ("[host.'https://a'.header]\n'X Y' = 'z'", "not a header"),
        ("[host.'https://a'.header]\nX = \"a\\r\\nY: b\"", "not a header"),
        ("[host.'https://a']\ndial_timeout = '5 apples'", "not a time"),
        ("[[host]]", "host"),
        ("not toml", "hosts.toml"),
    ],
)
def test_the_error_of_an_invalid_file_names_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, "r.example", text)
    with pytest.raises(InvalidSpec) as caught:
        hosts_for("r.example", [tmp_path])
    assert str(path) in caught.value.message and words in caught.value.message


# What documents of programs have in hosts.toml, and what it means: (where from, the text, what is
# known of the first host).
FIELD = [
    (
        "containerd's hosts.md: client certificate and key in one file",
        'client = [["c.crt", "c.key"], ["c.pem", ""]]',
        lambda h: [Path(k).name if k else None for _, k in h.client] == ["c.key", None],
    ),
    (
        "containerd: capabilities in any case",
        'capabilities = ["Pull", "RESOLVE"]',
        lambda h: h.can(PULL) and h.can(RESOLVE),
    ),
    (
        "containerd: no capabilities are all",
        "capabilities = []",
        lambda h: h.can(PULL) and h.can(RESOLVE),
    ),
    (
        "containerd: its own proxy",
        'proxy = "http://u:p@proxy.example:3128/"',
        lambda h: h.proxy.url == "http://proxy.example:3128" and h.proxy.headers,
    ),
    (
        "containerd: SOCKS",
        'proxy = "socks5h://u:p@proxy.example"',
        lambda h: h.proxy.is_socks and h.proxy.login == ("u", "p"),
    ),
    ("containerd: the default time", 'dial_timeout = ""', lambda h: h.dial_timeout_s == 30),
    ("Go's ParseDuration", 'dial_timeout = "1.5s250ms.5s"', lambda h: h.dial_timeout_s == 2.25),
    (
        "k3s's and RKE2's private-registry page",
        'rewrite = { "^rancher/(.*)" = "mirrorproject/rancher-images/$1" }',
        lambda h: h.repository("rancher/pause") == "mirrorproject/rancher-images/pause",
    ),
    (
        "k3s: everything below a project (Harbor, Nexus, Artifactory)",
        'rewrite = { "(.*)" = "docker-hub/$1" }',
        lambda h: h.repository("library/busybox") == "docker-hub/library/busybox",
    ),
    (
        "the same without a group",
        'rewrite = { ".*" = "all" }',
        lambda h: h.repository("library/busybox") == "all",
    ),
    (
        "Go's named groups",
        'rewrite = { "^(?P<path>.+)$" = "docker-hub/${path}" }',
        lambda h: h.repository("library/busybox") == "docker-hub/library/busybox",
    ),
    (
        "RE2's classes",
        "rewrite = { '^([[:alnum:]]+)/(.*)\\z' = '${2}-$1' }",
        lambda h: h.repository("a1/b") == "b-a1",
    ),
    ("Go's longest name", 'rewrite = { "^(a)" = "$1x/" }', lambda h: h.repository("ab") == "/b"),
    ("Go's names", 'rewrite = { "^(a)" = "${01}$1é/-" }', lambda h: h.repository("ab") == "/-b"),
    ("Go's dollar", 'rewrite = { "^a" = "b$$c$" }', lambda h: h.repository("a") == "b$c$"),
    ("Go's empty matches", 'rewrite = { "x*" = "-" }', lambda h: h.repository("axxb") == "-a-b-"),
    (
        "nydus-snapshotter's keys",
        'failure_limit = 5\nping_url = "http://x"\nhealth_check_interval = 5',
        lambda h: h.can(PULL),
    ),
    (
        "keys of others",
        "plain_http = true\nauth = { realm = 'x', username = 'u' }",
        lambda h: h.auth.username == "u",
    ),
    (
        "spegel",
        'dial_timeout = "200ms"\ncapabilities = ["pull", "resolve"]',
        lambda h: h.dial_timeout_s == 0.2,
    ),
]


@pytest.mark.parametrize(("source", "text", "holds"), FIELD, ids=[source for source, *_ in FIELD])
def test_hosts_files_of_other_programs_are_read(
    tmp_path: Path, source: str, text: str, holds: Callable[[RegistryHost], object]
) -> None:
    write(tmp_path, "r.example", f'[host."https://m.example"]\n{text}\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [first, _] = hosts_for("r.example", [tmp_path])
        assert holds(first), source


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("sever = 'https://a'", "sever is unknown and ignored"),
        (
            "[host.'https://a']\nplain_http = true",
            "host.'https://a'.plain_http is unknown and ignored",
        ),
        (
            "[host.'https://a'.auth]\nuser = 'u'",
            "host.'https://a'.auth.user is unknown and ignored",
        ),
        (
            "[host.'https://a'.rewrite]\n'^(a)' = '$1x'",
            "host.'https://a'.rewrite.'^(a)' has no group '1x'",
        ),
    ],
)
def test_ignored_keys_are_logged_once(
    tmp_path: Path, text: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "r.example", text)
    for _ in range(2):
        hosts_for("r.example", [tmp_path])
    [record] = caplog.records
    assert record.getMessage().startswith(f"{path}: {warning}")
    [ignored] = read_file(path, "r.example", own=True).warnings
    assert ignored.startswith(warning)


def test_an_invalid_file_affects_only_its_registry(tmp_path: Path) -> None:
    write(tmp_path, "r.example", "server = 5")
    write(tmp_path, "_default", 'server = "https://mirror.example"')
    assert hosts_for("other.example", [tmp_path])[0].url == "https://mirror.example"


def test_docker_io_is_the_registry_not_the_web_site(tmp_path: Path) -> None:
    """`server = "https://docker.io"`, as in containerd's page hosts.md, means the registry
    https://registry-1.docker.io."""
    write(
        tmp_path,
        "docker.io",
        'server = "https://docker.io"\n[host."https://registry-1.docker.io"]\n',
    )
    [only] = hosts_for("docker.io", [tmp_path])
    assert (only.url, only.prefix, only.upstream) == ("https://registry-1.docker.io", "/v2", True)


def test_rewrites_and_logins_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        "r.example",
        """
        [host."https://m.example"]
        rewrite = { "^team/(.*)" = "mirror/${1}-$1", "^" = "all/" }
        [host."https://m.example".auth]
        username = "u"
        password = "secret"
        [host."https://public.example"]
        pull_secrets = false
        """,
    )
    mirror, public, upstream = hosts_for("r.example", [tmp_path])
    assert [mirror.repository(path) for path in ("team/a/b", "other")] == [
        "mirror/a/b-a/b",
        "all/other",
    ]
    assert mirror.auth == Auth("u", "secret") and "secret" not in repr(mirror)
    assert [host.trusted for host in (mirror, public, upstream)] == [True, False, True]
    assert upstream.repository("team/a") == "team/a"


def test_hosts_of_the_default_file_are_not_trusted(tmp_path: Path) -> None:
    write(tmp_path, "_default", 'server = "https://elsewhere"\n[host."https://m.example"]')
    assert [host.trusted for host in hosts_for("r.example", [tmp_path])] == [False, False]


@pytest.mark.parametrize("table", ['{ "(" = "x" }', '{ "(?=a)" = "x" }'])
def test_an_error_names_an_invalid_rewrite(tmp_path: Path, table: str) -> None:
    path = write(tmp_path, "r.example", f'[host."https://m.example"]\nrewrite = {table}')
    with pytest.raises(InvalidSpec) as caught:
        hosts_for("r.example", [tmp_path])
    assert str(path) in caught.value.path and ".rewrite." in caught.value.path


def test_the_first_folder_with_the_host_is_used(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write(first, "_default", 'server = "https://a-default"')
    write(second, "r.example", 'server = "https://b"')
    write(second, "_default", 'server = "https://b-default"')
    urls = [hosts_for(name, [first, second])[-1].url for name in ("r.example", "other")]
    assert urls == ["https://b", "https://a-default"]
