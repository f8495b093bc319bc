"""Addresses that can be bound, and those that cannot."""

import re
import socket

import pytest

from tailrace.config import ServerConfig
from tailrace.errors import ConfigError
from tailrace.server import listening


def test_a_bound_port_that_nobody_listens_on_yet_is_taken_once():
    first = listening.bind("127.0.0.1", 0)
    with first, pytest.raises(ConfigError, match="Address already in use"):
        listening.bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", "1.2.3"])
def test_an_address_that_is_not_ours_is_named(host):
    with pytest.raises(ConfigError, match=f"cannot listen on {re.escape(host)}:0: "):
        listening.bind(host, 0)


def test_the_default_address_is_loopback():
    with listening.bind(ServerConfig().host, 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_an_ipv6_address_is_bound_as_such():
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        listener = listening.bind("::1", 0)
    except ConfigError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with listener:
        assert listener.family is socket.AF_INET6
