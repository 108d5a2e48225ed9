"""Where a registered replica may live (O-23): in an allowed network, and never where machines keep their secrets."""

from __future__ import annotations

import pytest

from gateway.feeds.addresses import Allowlist, Forbidden

EVERYTHING = Allowlist(["0.0.0.0/0", "::/0"])


@pytest.mark.parametrize(
    ("networks", "address"),
    [
        (["10.0.0.0/8"], "10.255.255.255"),
        (["127.0.0.0/8"], "127.0.0.1"),  # on one machine, if somebody says so
        (["192.168.1.7/32", "10.0.0.0/8"], "192.168.1.7"),
        (["fd00:1::/32"], "fd00:1::5"),
        (["0.0.0.0/0"], "8.8.8.8"),
        (["0.0.0.0/0", "::ffff:0:0/96"], "::ffff:10.0.0.1"),
    ],
)
def test_an_address_in_an_allowed_network(networks, address):
    Allowlist(networks).check(address)


@pytest.mark.parametrize(
    ("networks", "address"),
    [
        ([], "10.0.0.1"),
        (["10.0.0.0/8"], "11.0.0.1"),
        (["10.0.0.0/8"], "127.0.0.1"),
        (["10.0.0.0/8"], "::1"),
        (["10.0.0.0/8"], "::ffff:10.0.0.1"),  # an IPv6 address is not in it, whatever it carries
        (["::/0"], "::ffff:10.0.0.1"),  # and what it carries is not either
        (["::/0"], "2002:7f00:1::"),  # 6to4 to 127.0.0.1
        (["::/0"], "64:ff9b::10.0.0.1"),
    ],
)
def test_an_address_outside(networks, address):
    with pytest.raises(Forbidden, match="outside"):
        Allowlist(networks).check(address)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "0.0.0.0",
        "0.1.2.3",
        "224.0.0.1",
        "255.255.255.255",
        "240.0.0.1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "ff02::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "::ffff:169.254.169.254",
        "::ffff:0.0.0.0",
        "64:ff9b::169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "2001:0:a9fe:a9fe::1",  # Teredo, by way of that server
    ],
)
def test_some_addresses_are_refused_whatever_is_allowed(address):
    with pytest.raises(Forbidden, match="never allowed"):
        EVERYTHING.check(address)


@pytest.mark.parametrize("text", ["", "localhost", "2130706433", "0x7f000001", "127.1", "10.0.0.1/8", "::1]"])
def test_what_is_no_address(text):
    with pytest.raises(Forbidden, match="no address"):
        EVERYTHING.check(text)
