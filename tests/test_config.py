"""A configuration is either understood completely or refused with the path of the key that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from gateway.config import FILES, Config, ConfigError, PolicyName, Server, load, replica_url
from gateway.core.settings import POLICY_NAMES, RoutingSettings


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> Path:
        path = tmp_path / "warmlane.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_an_empty_file_means_the_defaults(write):
    assert load(write("")) == Config()


def test_a_whole_file_is_read(write):
    config = load(
        write(
            """
            [server]
            host = "0.0.0.0"
            port = 9000
            keep_alive_seconds = 5          # a whole number is a fine number of seconds
            [[replicas]]
            url = "http://127.0.0.1:8101/"
            prefill_rate = 39000
            [[replicas]]
            url = "http://gpu-7"
            engine = "llama.cpp"
            cache_tokens = 8192
            [discovery]
            dns = "http://vllm.default.svc:8000/"
            [routing]
            policy = "least-work"
            shadow = ["cache-cost", "random"]
            [feeds]
            scrape_interval_seconds = 0.25
            """
        )
    )
    assert (config.server.host, config.server.port, config.server.keep_alive_seconds) == ("0.0.0.0", 9000, 5.0)
    assert [replica.url for replica in config.replicas] == ["http://127.0.0.1:8101", "http://gpu-7:80"]
    assert config.replicas[0].prefill_rate == 39_000.0
    assert [replica.engine for replica in config.replicas] == [None, "llama.cpp"]
    assert [replica.cache_tokens for replica in config.replicas] == [None, 8_192]
    assert config.discovery.dns == "http://vllm.default.svc:8000"
    assert config.routing.settings().policy == "least-work"
    assert config.routing.shadow == ("cache-cost", "random")
    assert config.feeds.scrape_interval_seconds == 0.25


def test_routing_defaults_are_those_of_the_core():
    assert Config().routing.settings() == RoutingSettings()


def test_every_policy_of_the_core_can_be_configured():
    assert get_args(PolicyName) == POLICY_NAMES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown key prot; did you mean port in [server]?"),
        ("xyzzy = 1", "unknown key xyzzy"),
        ('[redis]\nurl = "http://user:hidden@redis"', "redis.url: begins with redis://, rediss:// or unix://"),
        ('[redis]\nurl = "redis://"', "redis.url: names no server"),
        ('[redis]\nurl = "redis://redis:port"', "redis.url: is no URL"),
        ("[server]\nprot = 1", "unknown key server.prot; did you mean port?"),
        (
            '[[replicas]]\nurl = "http://a"\n[[replicas]]\nulr = "http://b"',
            "unknown key replicas[1].ulr; did you mean url?",
        ),
        ("[[replicas]]\nprefill_rate = 1", "replicas[0].url: missing, and needed"),
        ('[server]\nport = "8000"', "server.port: expected a whole number, not text in quotes"),
        ("[server]\nport = 65536", "server.port: expected a whole number of at most 65535"),
        ("[routing]\nmax_wait_seconds = nan", "routing.max_wait_seconds: expected a number above 0"),
        (
            "[routing]\ndefault_prefill_rate = inf",
            "routing.default_prefill_rate: expected a number of at most 1000000000",
        ),
        ('[routing]\npolicy = "fastest"', f"routing.policy: 'fastest' is none of {', '.join(POLICY_NAMES)}"),
        ('[routing]\nshadow = ["random", "x"]', f"routing.shadow[1]: 'x' is none of {', '.join(POLICY_NAMES)}"),
        ('[routing]\nshadow = ["random", "random"]', "routing.shadow: random is listed twice"),
        ('[routing]\nshadow = "random"', "routing.shadow: expected a list, not text in quotes"),
        ('[routing]\nhold = "no"', "routing.hold: expected true or false, not text in quotes"),
        ("[upstream]\nca_file = true", "upstream.ca_file: expected text in quotes, not true or false"),
        (
            '[replicas]\nurl = "http://a"',
            "replicas: write [[replicas]], with two brackets on each side: there may be several",
        ),
        ("[[server]]\nport = 1", "server: write [server], with one bracket on each side: there is one"),
        ("[sever]\nport = 1", "unknown key sever; did you mean server?"),
        (
            '[[replicas]]\nurl = "http://a:1"\nengine = "sg-lang"',
            "replicas[0].engine: 'sg-lang' is none of vllm, sglang, tensorrt-llm, llama.cpp, ollama, openai",
        ),
        ('[server]\nlog = "xml"', "server.log: 'xml' is none of json, off"),
        ('[[replicas]]\nurl = "http://a"\n[[replicas]]\nurl = "http://A:80/"', "replicas: http://a:80 is listed twice"),
        (
            '[[replicas]]\nurl = "http://[::1]"\n[[replicas]]\nurl = "http://[0:0::1]:80"',
            "replicas: http://[::1]:80 is listed twice",
        ),
        (
            '[[replicas]]\nurl = "http://gpu-1"\n[[replicas]]\nurl = "http://gpu-1./"',
            "replicas: http://gpu-1:80 is listed twice",
        ),
        ("a = " + "[" * 5_000 + "]" * 5_000, "not TOML: nested too deeply"),
        (
            '[discovery]\ndns = "vllm:8000"',
            "discovery.dns 'vllm:8000': expected http://HOST[:PORT] or https://HOST[:PORT]",
        ),
        (
            '[discovery]\ndns = "srv://_vllm._tcp.example:8000"',
            "discovery.dns 'srv://_vllm._tcp.example:8000': expected srv://NAME or srv+https://NAME, without a port",
        ),
        (
            '[discovery]\nnameserver = "127.0.0.1"',
            'discovery.nameserver: only service records are asked of it; set dns = "srv://NAME"',
        ),
        (
            '[discovery]\ndns = "srv://_vllm._tcp.example"\nnameserver = "ns.example"',
            "discovery.nameserver 'ns.example': expected ADDRESS[:PORT]",
        ),
        ("[discovery]\nredis = true", "discovery.redis: there is no Redis to look at; set redis.url"),
        (
            '[discovery]\nredis = true\n[redis]\nurl = "redis://r"',
            "discovery.redis: no network is allowed; set admin.allow",
        ),
        (
            '[admin]\nallow = ["10.0.0.0/8"]',
            "admin.allow: registrations come in on a listener of their own, or through Redis; "
            "set admin.port or discovery.redis",
        ),
        (
            '[[replicas]]\nurl = "vllm:8000"',
            "replica URL 'vllm:8000': expected http://HOST[:PORT] or https://HOST[:PORT]",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_path(write, text, message):
    assert refusal(write(text)) == message


def test_a_file_that_is_not_toml_names_the_line(write):
    assert refusal(write("[server\n")).startswith("not TOML: ")
    assert refusal(write("a = " + "9" * 5_000)).startswith("not TOML: ")


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "warmlane.toml"
    path.write_bytes(b'host = "\xff"')
    assert refusal(path).startswith("not TOML: ")


def test_a_missing_file_is_named(tmp_path):
    assert refusal(tmp_path / "absent.toml") == "No such file or directory"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8101", "http://127.0.0.1:8101"),
        ("http://127.0.0.1:8101/", "http://127.0.0.1:8101"),
        ("HTTP://Gpu-7.Example", "http://gpu-7.example:80"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("https://a", "https://a:443"),
        ("https://a:8000/", "https://a:8000"),
        ("http://LOCALHOST.:", "http://localhost:80"),
        ("http://gpu-7.:08000", "http://gpu-7.:8000"),
        ("http://127.1:8000", "http://127.0.0.1:8000"),
        ("http://0x7F.0.0.1.", "http://127.0.0.1:80"),
        ("http://2130706433", "http://127.0.0.1:80"),
        ("https://[2001:DB8:0::0001]", "https://[2001:db8::1]:443"),
        ("http://[::FFFF:127.0.0.1]", "http://[::ffff:127.0.0.1]:80"),
        ("http://[fe80::0001%25Eth0]:80/", "http://[fe80::1%Eth0]:80"),
        ("http://[fe80::1%2]", "http://[fe80::1%2]:80"),
    ],
)
def test_a_replica_url_is_normalised(text, url):
    assert replica_url(text) == url
    assert replica_url(url) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:8000",
        "file:///etc/passwd",
        "https://",
        "https://a/v1",
        "wss://a:8000",
        "http://",
        "http://a:0",
        "http://a:99999",
        "http://a:b",
        "http://[::1",
        "http://[::g]",
        "http://[1:2:3]",
        "http://a/v1",
        "http://a?x=1",
        "http://a#x",
        "http://user:pw@a",
        "http://@a",
        "http://a b",
        "http://a\x00b",
        "http://a..b",
        "http://%",
        "http://" + "a" * 64,
    ],
)
def test_a_replica_url_that_is_more_or_less_than_an_address_is_refused(text):
    with pytest.raises(ConfigError):
        replica_url(text)


def test_a_configuration_cannot_be_changed_after_reading():
    with pytest.raises(AttributeError):
        Server().port = 1  # type: ignore[misc]
    assert msgspec.structs.replace(Server(), port=1).port == 1


# -- files that it names


def test_relative_paths_are_taken_from_the_folder_of_the_file(tmp_path, monkeypatch):
    folder = tmp_path / "etc"
    folder.mkdir()
    path = folder / "warmlane.toml"
    tables = {table: {key: f"{key}.pem" for key in keys} for table, keys in FILES.items()}
    tables["auth"]["keys_file"] = "/absolute/keys.toml"
    path.write_text("\n".join(f"[{table}]\n{written(keys)}" for table, keys in tables.items()))
    monkeypatch.chdir(tmp_path)
    for given, expected in ((path, folder), (Path("etc/warmlane.toml"), Path("etc"))):
        config = load(given)
        for table, keys in FILES.items():
            for key in keys:
                wanted = "/absolute/keys.toml" if key == "keys_file" else str(expected / f"{key}.pem")
                assert getattr(getattr(config, table), key) == wanted
    monkeypatch.chdir(folder)
    assert load(Path("warmlane.toml")).server.tls_key == "tls_key.pem"


def written(keys: dict[str, str]) -> str:
    return "\n".join(f'{key} = "{value}"' for key, value in keys.items())


def test_every_key_that_names_a_file_is_known_as_one():
    for table in msgspec.structs.fields(Config):
        if table.name != "replicas":
            named = [
                key.name
                for key in msgspec.structs.fields(table.type)
                if key.name.endswith("_file") or key.name in ("tls_certificate", "tls_key")
            ]
            assert sorted(named) == sorted(FILES.get(table.name, ())), table.name
