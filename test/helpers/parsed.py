"""What a parser found, in a form that tests compare."""


def seen(result):
    """The calls of a result: (tool, arguments), or the code of the error."""
    return [call.error.code if call.error else (call.tool, dict(call.args)) for call in result.calls]
