"""Code that runs inside sandboxes. It needs Python 3.9 and imports only modules of this package.

`zygote` forks a `supervisor` for each trajectory. The supervisor runs commands, keeps files, and controls the
`worker` that runs cells, or a whole `script` in one of them. `confine` runs one command where no namespaces
can be created. `rights` and `namespaces` contain the system calls, `wire` the messages.
"""
