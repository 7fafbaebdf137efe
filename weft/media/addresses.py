"""The addresses from which an image may be fetched: public unicast addresses only.

The networks are listed here, because ``ipaddress.is_global`` differs between releases of Python.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# fmt: off
_NOT_PUBLIC_4 = tuple(map(IPv4Network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24",
    "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4",
    "168.63.129.16/32",  # Azure's internal services
)))
_PUBLIC_6 = IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(map(IPv6Network, (
    "2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20",
)))
"""Includes Teredo and 6to4, which embed IPv4 addresses. All other embeddings of IPv4 lie outside 2000::/3."""
# fmt: on


def is_public(address: str) -> bool:
    """Return True if ``address`` (in the form of ``getaddrinfo``) is a public internet address."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if isinstance(found, IPv6Address):
        mapped = found.ipv4_mapped
        if mapped is None:
            return found in _PUBLIC_6 and not any(found in network for network in _NOT_PUBLIC_6)
        found = mapped
    assert isinstance(found, IPv4Address)
    return not any(found in network for network in _NOT_PUBLIC_4)
