"""Network addresses, as rate and connection limits count them."""

import ipaddress
from collections.abc import Iterable


def address_key(address: str) -> str:
    """Return the key under which limits count a caller: for IPv6 its /64, since one machine can use all of it."""
    found = _parse(address)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(found), 64), strict=False))
    return str(found) if found is not None else address


def is_within(address: str, networks: Iterable[str]) -> bool:
    """Return whether the address is in one of these networks."""
    found = _parse(address)
    return found is not None and any(found in ipaddress.ip_network(network) for network in networks)


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found
