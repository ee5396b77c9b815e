"""Networks that were not granted cannot be reached: services of the host, of others, and of the internet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import warnings
from collections.abc import AsyncGenerator, Generator

from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.conformance.attack_cases import check_attacks_stopped, prepared_inside
from torchrl_agentic.sandbox.conformance.base import CaseGroup, Make
from torchrl_agentic.sandbox.conformance.host_cases import host_folder, new_mark
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

group = CaseGroup("network")
LOOPBACK = ResourceLimits(network="loopback")
CONNECT = """
import socket
socket.setdefaulttimeout(2)
def connect(family, kind, address):
    with socket.socket(getattr(socket, family), getattr(socket, kind)) as s:
        s.connect(address)
        if kind == 'SOCK_DGRAM': s.send(b'hello')
"""


@contextlib.asynccontextmanager
async def _service(host: str = "127.0.0.1") -> AsyncGenerator[int]:
    """Serve TCP on the host; yield the port."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), host, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


@contextlib.contextmanager
def _mailbox(family: socket.AddressFamily, address: str | tuple[str, int]) -> Generator[socket.socket]:
    """Receive datagrams on the host."""
    with socket.socket(family, socket.SOCK_DGRAM) as box:
        box.bind(address)
        box.setblocking(False)
        yield box


def _empty(box: socket.socket) -> bool:
    try:
        return not box.recv(100)
    except BlockingIOError:
        return True


@group.case("network")
async def tcp_services_of_the_host_are_out_of_reach(sandbox: Sandbox) -> None:
    code = """
        names = ['127.0.0.1', '127.0.0.2', 'localhost', '0.0.0.0', own, '10.0.2.2', '172.17.0.1']
        for name in names: attempt(name, lambda: connect('AF_INET', 'SOCK_STREAM', (name, port)))
        for name in ('::1', '::ffff:127.0.0.1'):
            attempt(name, lambda: connect('AF_INET6', 'SOCK_STREAM', (name, port)))
        attempt('fast open', lambda: socket.socket().sendto(b'x', 0x20000000, ('127.0.0.1', port)))
    """
    async with _service("0.0.0.0") as port:
        await check_attacks_stopped(sandbox, code, before=CONNECT, port=port, own=_own_address())


def _own_address() -> str:
    """Return the address of this host in its network, if it has one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            any_socket.connect(("192.0.2.1", 9))
            return str(any_socket.getsockname()[0])
        except OSError:
            return "127.0.0.1"


@group.case("network")
async def datagrams_do_not_arrive_at_the_host(sandbox: Sandbox) -> None:
    code = """
        for name in ('127.0.0.1', own, '255.255.255.255', '224.0.0.1'):
            attempt(name, lambda: connect('AF_INET', 'SOCK_DGRAM', (name, port)))
        def lite(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 136).sendto(b'x', ('127.0.0.1', port))
        attempt('lite', lite)
    """
    with _mailbox(socket.AF_INET, ("0.0.0.0", 0)) as box:
        await check_attacks_stopped(
            sandbox, code, before=CONNECT, port=box.getsockname()[1], own=_own_address()
        )
        assert _empty(box), "a datagram has arrived"


@group.attacks("network", before=CONNECT)
def names_cannot_be_looked_up() -> str:
    return """
        for name in ('example.com', 'metadata.google.internal'):
            attempt(name, lambda: socket.getaddrinfo(name, 80))
        for server in ('127.0.0.53', '1.1.1.1', '8.8.8.8', '169.254.169.254'):
            attempt(server, lambda: connect('AF_INET', 'SOCK_DGRAM', (server, 53)))
    """


@group.case("network")
async def sockets_of_the_host_are_out_of_reach_by_path(sandbox: Sandbox) -> None:
    code = """
        attempt('stream', lambda: connect('AF_UNIX', 'SOCK_STREAM', path))
        attempt('datagram', lambda: connect('AF_UNIX', 'SOCK_DGRAM', path_of_box))
        def by_pair(): socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'hello', path_of_box)
        attempt('pair', by_pair)
        attempt('link', lambda: (os.symlink(path, 's'), connect('AF_UNIX', 'SOCK_STREAM', 's')))
    """
    with host_folder() as folder:
        paths = {"path": f"{folder}/socket", "path_of_box": f"{folder}/box"}
        with _mailbox(socket.AF_UNIX, paths["path_of_box"]) as box, socket.socket(socket.AF_UNIX) as server:
            server.bind(paths["path"])
            server.listen()
            for path in paths.values():
                os.chmod(path, 0o777)
            await check_attacks_stopped(sandbox, code, before=CONNECT, **paths)
            assert _empty(box), "a datagram has arrived"


@group.case("network", needs=["linux"])
async def abstract_sockets_of_the_host_are_out_of_reach(sandbox: Sandbox) -> None:
    name = f"conformance-{new_mark()}"
    with _mailbox(socket.AF_UNIX, f"\0{name}-box") as box, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        code = """
            attempt('stream', lambda: connect('AF_UNIX', 'SOCK_STREAM', chr(0) + name))
            attempt('datagram', lambda: connect('AF_UNIX', 'SOCK_DGRAM', chr(0) + name + '-box'))
            pair = (socket.AF_UNIX, socket.SOCK_DGRAM)
            attempt('pair', lambda: socket.socketpair(*pair)[0].sendto(b'hello', chr(0) + name + '-box'))
        """
        await check_attacks_stopped(sandbox, code, before=CONNECT, name=name)
        assert _empty(box), "a datagram has arrived"


@group.attacks("network", needs=["linux"], before=CONNECT)
def raw_and_packet_sockets_cannot_be_opened() -> str:
    return """
        for family, kind, protocol in ((2, 3, 1), (2, 3, 255), (10, 3, 58), (17, 3, 0x300), (17, 2, 0x300)):
            attempt(f'{family} {kind} {protocol}', lambda: socket.socket(family, kind, protocol))
    """


@group.attacks("network", needs=["linux", "seccomp"], before=CONNECT)
def only_families_of_sockets_that_were_granted_can_be_opened() -> str:
    """Without a network none, in particular not those of kernel services or virtual machines."""
    return """
        for family in range(1, 47):
            for kind in (1, 2, 3, 5):
                attempt(f'family {family}, kind {kind}', lambda: socket.socket(family, kind, 0))
    """


@group.attacks("network", needs=["linux", "seccomp"], before=CONNECT)
def pairs_of_sockets_are_of_this_machine_alone() -> str:
    """The filter answers for other families, before the kernel creates a socket or loads a module for it."""
    return """
        import errno
        def reached(family, kind):
            try: socket.socketpair(family, kind)
            except OSError as error: return error.errno not in (errno.EAFNOSUPPORT, errno.EPERM)
            return True
        for family in range(2, 47):
            for kind in (1, 2, 3, 5):
                attempt(f'family {family}, kind {kind}', lambda: expect(reached(family, kind)))
        socket.socketpair()
    """


@group.attacks("network", needs=["linux"], before=CONNECT)
def the_hosts_virtual_machine_and_kernel_do_not_answer() -> str:
    return """
        import array, fcntl
        def ask_netlink():
            s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))
            s.send(bytes.fromhex('1400000012000103010000000000000000000000'))
            expect(len(s.recv(9999)) > 1500)
        attempt('netlink', ask_netlink)
        for number in (0, 1, 2): attempt('vsock', lambda: connect('AF_VSOCK', 'SOCK_STREAM', (number, 1024)))
        attempt('vsock device', lambda: os.open('/dev/vsock', os.O_RDONLY))
        attempt('tun', lambda: os.open('/dev/net/tun', os.O_RDWR))
    """


@group.case("network", needs=["linux"])
async def interfaces_and_connections_of_the_host_are_out_of_sight(sandbox: Sandbox) -> None:
    code = """
        def interfaces():
            names = {line.partition(':')[0].strip() for line in open('/proc/net/dev') if ':' in line}
            expect(names - {'lo', 'tunl0', 'sit0', 'ip6tnl0'})
        attempt('interfaces', interfaces)
        for name in ('tcp', 'tcp6', 'udp', 'raw', 'unix'):
            attempt(name, lambda: expect(mark in open('/proc/net/' + name).read()))
    """
    async with _service() as port:
        await check_attacks_stopped(sandbox, code, mark=f":{port:04X}")


@group.case("network")
async def a_call_cannot_widen_the_network(sandbox: Sandbox) -> None:
    async with _service() as port:
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('through')"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            argv = [*sandbox.python_argv, "-c", code]
            result = await sandbox.run(argv, limits=ResourceLimits(network="full"))
        assert result.exit_code > 0, result
        assert "through" not in result.stdout, result


@group.case("network", limits=LOOPBACK, needs=["loopback"])
async def a_loopback_that_was_granted_is_its_own(sandbox: Sandbox) -> None:
    code = """
        for family, name in (('AF_INET', '127.0.0.1'), ('AF_INET', own), ('AF_INET6', '::1')):
            attempt(name, lambda: connect(family, 'SOCK_STREAM', (name, port)))
        if own != '127.0.0.1': attempt('datagram', lambda: connect('AF_INET', 'SOCK_DGRAM', (own, port)))
        for family in (16, 17, 38, 40, 44): attempt(f'family {family}', lambda: socket.socket(family, 3, 0))
        with socket.create_server(('127.0.0.1', 0)) as server:
            socket.create_connection(server.getsockname()).close()
    """
    async with _service("0.0.0.0") as port:
        await check_attacks_stopped(sandbox, code, before=CONNECT, port=port, own=_own_address())


@group.factory_case("network", needs=["loopback", "linux"])
async def two_sandboxes_with_a_loopback_do_not_hear_each_other(make: Make) -> None:
    name = f"conformance-{new_mark()}"
    serve = """
        import socket
        server = socket.create_server(('127.0.0.1', 0)); print(server.getsockname()[1])
        abstract = socket.socket(socket.AF_UNIX); abstract.bind(chr(0) + name); abstract.listen()
    """
    code = """
        attempt('tcp', lambda: connect('AF_INET', 'SOCK_STREAM', ('127.0.0.1', port)))
        attempt('abstract', lambda: connect('AF_UNIX', 'SOCK_STREAM', chr(0) + name))
    """
    async with (
        make(LOOPBACK) as sandbox,
        make(LOOPBACK) as other,
        prepared_inside(sandbox, serve, name=name) as port,
    ):
        await check_attacks_stopped(other, code, before=CONNECT, port=int(port or 1), name=name)
