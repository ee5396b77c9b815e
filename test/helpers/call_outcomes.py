"""Parsed calls in a form that tests compare."""


def outcomes(result):
    """Return (tool, arguments) of each call, or the code of its error."""
    return [call.error.code if call.error else (call.tool, dict(call.args)) for call in result.calls]
