"""Which addresses are public."""

import ipaddress

import pytest
from helpers.web_addresses import ADDRESSES, NOT_PUBLIC, PUBLIC, looks_public
from hypothesis import given

from torchrl_agentic.tools.http.policy import is_public, parse_address, parse_network


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_an_address_of_a_special_range_is_not_public(text: str):
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", PUBLIC)
def test_address_next_to_a_special_range_is_public(text: str):
    assert is_public(ipaddress.ip_address(text))


@given(ADDRESSES)
def test_public_addresses_agree_with_the_standard_library(address: ipaddress.IPv4Address):
    assert not is_public(address) or looks_public(address)


@pytest.mark.parametrize(
    "text",
    ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.0.0.01", "127.0.0.1.", "fe80::1%eth0",
     "[1.2.3.4]", "[::1", "::1]", "1.2.3.4/32", "", "x", "１２７.0.0.1"],
)  # fmt: skip
def test_only_full_addresses_are_read(text: str):
    assert parse_address(text) is None


def test_a_mapped_address_names_the_one_inside():
    assert parse_network("::ffff:10.0.0.5") == ipaddress.ip_network("10.0.0.5")
    assert parse_network("[fd00::5]") == ipaddress.ip_network("fd00::5")
    assert parse_network("10.0.0.1/8") is None
