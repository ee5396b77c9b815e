"""What runs inside a sandbox: needs nothing but Python 3.9 and imports only its own kind.

`zygote` forks a `supervisor` per trajectory, which runs commands, keeps files, and serves the `worker` that
runs cells, or a whole `script` in one of them. `confine` runs one command where no namespaces can be had.
`rights` and `namespaces` hold the system calls, `wire` the messages.
"""
