"""What went wrong on the network, in a sentence for the model.

Nearly all of it is an ERROR: the model chose the URL, and what a reward leaves out (INFRA) must not be its to
choose. Only what this machine itself lacks is nobody's fault.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Iterator

import httpcore

from torchrl_agentic.errors import InfrastructureError, ToolError

MAX_CAUSES = 10

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
_AWAY = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


def explained(error: Exception, host: str, port: int) -> ToolError | InfrastructureError:
    """Give the exception that says what became of a request."""
    where = f"{host}:{port}"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _failure(
                "certificate", f"the certificate of {where} is not accepted: {cause.verify_message}"
            )
        if isinstance(cause, ssl.SSLError):
            return _failure("tls", f"{where} does not speak TLS as it should; try http:// if it is meant to")
        if isinstance(cause, ConnectionRefusedError):
            return _failure("refused", f"nothing listens at {where}: the connection was refused")
        if isinstance(cause, OSError) and cause.errno in _OURS:
            return InfrastructureError(f"no connection can be made from here: {cause.strerror}")
        if isinstance(cause, OSError) and cause.errno in _AWAY:
            return _failure("unreachable", f"{host} cannot be reached from here")
    match error:
        case httpcore.ConnectError() | httpcore.ConnectTimeout():
            return _failure("unreachable", f"{where} does not answer")
        case httpcore.RemoteProtocolError() if "disconnected" in str(error):
            return _failure("no answer", f"{where} closed the connection without an HTTP answer")
        case httpcore.RemoteProtocolError() if "too long" in str(error):
            return _failure("not HTTP", f"{where} sends headers without end")
        case httpcore.RemoteProtocolError():
            return _failure("not HTTP", f"what {where} answers is not HTTP/1.1")
        case httpcore.LocalProtocolError():
            return _failure("request", f"the request cannot be sent as HTTP/1.1: {error}")
        case _:
            return _failure("broken", f"the connection to {where} broke off")


def _failure(reason: str, text: str) -> ToolError:
    return ToolError(text, {"reason": reason})


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what led to it: httpcore and anyio wrap what the system said."""
    for _ in range(MAX_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
