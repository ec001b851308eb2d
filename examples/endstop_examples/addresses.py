"""Which network addresses the examples may fetch from. The rule: public ones only, whatever they are wrapped in."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Blocks of the IANA special-purpose registries that `ipaddress` judges differently from one Python version to the next.
_SPECIAL = tuple(
    ipaddress.ip_network(block)
    for block in (
        "192.0.0.0/24",
        "192.88.99.0/24",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
        "5f00::/16",
        "fec0::/10",
    )
)

Resolve = Callable[[str, int], Sequence[str]]


def resolve_host(host: str, port: int) -> Sequence[str]:
    """The addresses of a host as the system resolves it, in its order, without repetitions."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def refused_as(address: str) -> str | None:
    """Why an address may not be fetched from ("loopback", "private", …), or None for a public one.

    An IPv4 address carried inside an IPv6 one (mapped, compatible, 6to4, Teredo, NAT64) is judged as well: the
    packet ends there.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return "not an IP address"
    for candidate in (*_carried(ip), ip):
        reason = _refused_alone(candidate)
        if reason is not None:
            return reason
    return None


def _carried(ip: _IpAddress) -> tuple[_IpAddress, ...]:
    if isinstance(ip, ipaddress.IPv4Address):
        return ()
    inner: list[_IpAddress] = [found for found in (ip.ipv4_mapped, ip.sixtofour) if found is not None]
    inner.extend(ip.teredo or ())
    # Below 2**16 of the compatible range stand :: and ::1, which carry nothing.
    if ip in _NAT64 or 2**16 <= int(ip) < 2**32:
        inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF))
    return tuple(inner)


def _refused_alone(ip: _IpAddress) -> str | None:
    # ::ffff:0:0/96 counts as private or reserved by itself; what it carries is judged in its own right.
    if isinstance(ip, ipaddress.IPv6Address) and (ip.ipv4_mapped is not None or ip in _NAT64):
        return None
    verdicts = (
        ("unspecified", ip.is_unspecified),
        ("loopback", ip.is_loopback),
        ("link-local", ip.is_link_local),
        ("multicast", ip.is_multicast),
        ("special-purpose", any(ip in block for block in _SPECIAL)),
        ("private", ip.is_private),
        ("reserved", ip.is_reserved),
        ("not globally routable", not ip.is_global),
    )
    return next((reason for reason, holds in verdicts if holds), None)
