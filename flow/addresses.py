"""Addresses that somebody else chose: only public ones are asked, and only at the address that was checked.

Whoever names a URL could otherwise have us ask what only we can reach.
"""

from __future__ import annotations

import errno
import ipaddress
import socket


class ForbiddenAddress(OSError):
    """A name or an address leads where we do not send anything."""

    def __init__(self, host: str, address: str) -> None:
        self.host, self.address = host, address
        super().__init__(errno.EACCES, f"{host} is at {address}, which is not a public address")


# All of IPv6 that is given out is in here; the second holds IPv4 addresses in their last 32 bits.
_IPV6_GIVEN_OUT = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What Python 3.11 takes for public: relays to IPv4 addresses of anybody's choice, documentation; and clouds' own
# hosts, which only their machines reach (Azure, Oracle).
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in ("2002::/16", "3fff::/20", "192.88.99.0/24", "168.63.129.16/32", "192.0.0.192/32")
)


def is_public(address: str) -> bool:
    """Whether the address is one that the whole Internet reaches, and not one of our own machines or networks."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip not in _IPV6_GIVEN_OUT:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _NOT_PUBLIC)


def look_up(host: str, port: int) -> list[str]:
    """Every address of a host. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
