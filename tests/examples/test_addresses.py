"""Only public addresses may be fetched from, whatever they are wrapped in."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop_examples.addresses import refused_as


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("::1", "loopback"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("192.168.1.1", "private"),
        ("fd00::1", "private"),
        ("fec0::1", "special-purpose"),
        ("169.254.169.254", "link-local"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("0.0.0.0", "unspecified"),
        ("::", "unspecified"),
        ("255.255.255.255", "private"),
        ("240.0.0.1", "private"),
        ("100.64.0.1", "not globally routable"),
        ("192.0.2.1", "private"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::ffff:10.0.0.1", "private"),
        ("::127.0.0.1", "loopback"),
        ("2002:7f00:1::", "loopback"),
        ("2002:a9fe:a9fe::1", "link-local"),
        ("64:ff9b::169.254.169.254", "link-local"),
        ("64:ff9b:1::808:808", "special-purpose"),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", "loopback"),
        ("2002:808:808::1", "special-purpose"),
        ("192.0.0.200", "special-purpose"),
        ("192.88.99.1", "special-purpose"),
        ("2001:db8::1", "special-purpose"),
        ("3fff::1", "special-purpose"),
        ("no address", "not an IP address"),
        ("", "not an IP address"),
    ],
)
def test_an_address_that_is_not_public_is_refused_with_its_reason(address: str, reason: str) -> None:
    assert refused_as(address) == reason


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_a_public_address_is_not_refused(address: str) -> None:
    assert refused_as(address) is None


@given(st.ip_addresses(v=4))
def test_wrapping_an_ipv4_address_never_makes_it_more_acceptable(address: ipaddress.IPv4Address) -> None:
    wrapped = [
        ipaddress.IPv6Address(0xFFFF_0000_0000 | int(address)),
        ipaddress.IPv6Address((0x2002 << 112) | (int(address) << 80)),
        ipaddress.IPv6Address((0x64_FF9B << 96) | int(address)),
    ]
    if refused_as(str(address)) is not None:
        assert all(refused_as(str(candidate)) is not None for candidate in wrapped)


@given(st.ip_addresses())
def test_whatever_python_calls_not_global_is_refused(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    carried = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    if not carried and (not address.is_global or address.is_multicast):
        assert refused_as(str(address)) is not None


@given(st.text(max_size=60))
def test_any_text_is_answered_without_a_failure(text: str) -> None:
    verdict = refused_as(text)
    assert verdict is None or isinstance(verdict, str)
