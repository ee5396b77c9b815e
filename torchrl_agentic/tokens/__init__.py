"""Token-exact prompts, without TensorDict.

`writer` is the entry point; it uses `chat_template` and `encoding` for messages, `ledger` for the tokens,
`drift` to check them, `truncate` and `media` for what tools return.
"""
