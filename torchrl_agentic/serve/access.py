"""Decides who is served, by the headers of a request alone: before its body is read."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrl_agentic.serve.refusals import Forbidden, Unauthorized
from torchrl_agentic.tools.token_file import check_token

_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\s:@/\[\]]+))(?P<port>:\d*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a server. Pages in a browser may not, whatever is set here.

    A page can send requests to servers on the machine of its reader. A browser says so in `Origin` and
    `Sec-Fetch-Site`, and does not send JSON to another site that has not allowed it. A page whose own name
    was bound to the address of the server later on ("DNS rebinding") is told by that name in `Host`.

    Args:
        token: What requests have to send as `Authorization: Bearer …`; None: nothing.
        hosts: Names and addresses that `Host` may have besides those of loopback, without a port; None: any.

    Raises:
        ValueError: If the token or a host cannot be one.
    """

    token: str | None = field(default=None, repr=False)
    hosts: Sequence[str] | None = ()

    def __post_init__(self) -> None:
        if self.token is not None:
            check_token(self.token)
        for host in self.hosts or ():
            found = _HOST.fullmatch(host.lower())
            if found is None or found["port"] is not None:
                raise ValueError(
                    f"{host!r} is no allowed host; expected a name or an address, without a port"
                )

    def check(self, headers: Mapping[str, Sequence[str]], *, needs_token: bool) -> None:
        """Check the headers of a request.

        Args:
            headers: Values of headers by their names in small letters.
            needs_token: Whether this request has to send the token, if there is one.

        Raises:
            Forbidden: If it comes from a web page, or is meant for another host.
            Unauthorized: If it does not have the token.
        """
        host = _only(headers, "host")
        if not self._is_served(host):
            raise Forbidden(
                f"no requests to the host {host[:200]!r} are served here; ask localhost, or allow that host "
                "when the server starts (--allowed-host)"
            )
        for origin in headers.get("origin", ()):
            # Where any host is served, the name of a page may have been bound to this address.
            if self.hosts is None or origin not in (f"http://{host}", f"https://{host}"):
                raise Forbidden("requests of web pages are not served")
        if any(site.lower() not in ("same-origin", "none") for site in headers.get("sec-fetch-site", ())):
            raise Forbidden("requests of web pages are not served")
        if needs_token and self.token is not None:
            scheme, _, given = _only(headers, "authorization").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode(), self.token.encode())
            if not (is_right and scheme.lower() == "bearer"):
                raise Unauthorized("a token is needed: send the header Authorization: Bearer …")

    def _is_served(self, host: str) -> bool:
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        if self.hosts is None:
            return True
        name = found["v6"] or found["name"]
        return is_loopback(name) or name in {known.lower().strip("[]") for known in self.hosts}


def is_loopback(name: str) -> bool:
    """Return whether a name or an address always means the machine that asks."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _only(headers: Mapping[str, Sequence[str]], name: str) -> str:
    """Return the value of a header that is there once, or ""."""
    values = headers.get(name, ())
    return values[0] if len(values) == 1 else ""
