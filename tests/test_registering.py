"""`--register`: the URL under which gateways reach a replica of this machine; and gateways want a secret for it."""

from __future__ import annotations

import pytest

from gateway.config import Admin, Config, ConfigError, Discovery, Redis
from gateway.redis_feeds import announced_in
from gateway.registering import announced_url

REDIS = "redis://127.0.0.1:6379"


@pytest.mark.parametrize(
    ("host", "redis", "told", "url"),
    [
        ("10.0.0.7", REDIS, None, "http://10.0.0.7:8101"),
        ("fd00::7", REDIS, None, "http://[fd00::7]:8101"),
        ("0.0.0.0", REDIS, None, "http://127.0.0.1:8101"),  # as this machine reaches a Redis of its own
        ("0.0.0.0", "redis://:pw@127.0.0.1", None, "http://127.0.0.1:8101"),
        ("::", "unix:///run/redis.sock", None, "http://127.0.0.1:8101"),
        ("0.0.0.0", REDIS, "https://gpu-7", "https://gpu-7:443"),
    ],
)
def test_it_is_where_the_replica_listens_unless_told(host, redis, told, url):
    assert announced_url(host, 8101, redis, told) == url


def test_what_cannot_be_found_out_has_to_be_told():
    with pytest.raises(ConfigError, match=r"--register: nowhere\.invalid: .*; say --register-as URL"):
        announced_url("0.0.0.0", 8101, "redis://:pw@nowhere.invalid", None)
    with pytest.raises(ConfigError, match="--register-as 'gpu-7:8101'"):
        announced_url("0.0.0.0", 8101, REDIS, "gpu-7:8101")


def test_a_gateway_without_the_secret_takes_in_nobody():
    config = Config(redis=Redis(url=REDIS), discovery=Discovery(redis=True), admin=Admin(allow=("10.0.0.0/8",)))
    with pytest.raises(ConfigError, match=r"set \$WARMLANE_REDIS_SECRET"):
        announced_in(config, {}, None, dict, None, lambda: 0.0)
