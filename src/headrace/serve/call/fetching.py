"""Fetches pictures that requests name by their address: from hosts that the server's flags name, and from no address of
a private network (S-16).

The address that was checked is the one that is connected to, so that a name which resolves to another one a moment
later gains nothing. Redirects are not followed. Called by `service`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

import httpx

from headrace.protocol.errors import RequestError
from headrace.text.pictures.reading import MAX_BYTES

TIMEOUT_S = 10.0
PORTS = {"http": 80, "https": 443}
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""Addresses of IPv4 behind a translator (RFC 6052), private ones too."""


async def fetch(url: str, field: str, domains: Sequence[str]) -> bytes:
    """Return the file at `url`. Raises `RequestError` naming `field`."""
    try:
        place = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise RequestError(field, url[:80], f"a web address: {error}") from None
    host = place.host.lower()
    if host not in [domain.lower() for domain in domains]:
        bound = "a data URL, or an address of a host that the server fetches from (--allowed-media-domains)"
        raise RequestError(field, f"{place.scheme}://{host[:80]}", bound)
    if place.scheme not in PORTS or place.userinfo:
        raise RequestError(field, url[:80], "an address that begins with http or https, without a user")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            address = await _address(host, place.port or PORTS[place.scheme], field)
            return await read_reply(place, address, field)
    except TimeoutError:
        raise RequestError(field, host, f"a picture that comes within {TIMEOUT_S:g} s") from None
    except (httpx.HTTPError, OSError) as error:
        raise RequestError(field, host, f"a picture that can be fetched: {str(error)[:120]}") from None


async def _address(host: str, port: int, field: str) -> str:
    """Return an address of a host, all of which are public."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in entries]
    private = [address for address in addresses if not is_public(address)]
    if private or not addresses:
        raise RequestError(field, host, "a host whose addresses are public")
    return addresses[0]


def is_public(address: str) -> bool:
    """Return whether an address is one of the public network, in the form of IPv4 that it may hide too."""
    number = ipaddress.ip_address(address.partition("%")[0])
    hidden = getattr(number, "ipv4_mapped", None) or getattr(number, "sixtofour", None)
    if hidden is not None:
        return is_public(str(hidden))
    return number.is_global and not number.is_multicast and not (number.version == 6 and number in TRANSLATED)


async def read_reply(place: httpx.URL, address: str, field: str) -> bytes:
    literal = f"[{address}]" if ":" in address else address
    async with (
        httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=TIMEOUT_S) as client,
        client.stream(
            "GET",
            place.copy_with(host=literal),
            headers={"host": place.netloc.decode("ascii"), "accept": "image/*"},
            extensions={"sni_hostname": place.host},
        ) as reply,
    ):
        if reply.status_code != 200:
            raise RequestError(field, place.host, f"a picture: its host replied with status {reply.status_code}")
        body = bytearray()
        async for part in reply.aiter_raw():
            body += part
            if len(body) > MAX_BYTES:
                raise RequestError(field, place.host, f"at most {MAX_BYTES} bytes large")
        return bytes(body)
