from torchrl_agentic.errors import FilesNotCopied as FilesNotCopied
from torchrl_agentic.errors import InfrastructureError as InfrastructureError
from torchrl_agentic.errors import SandboxError as SandboxError
from torchrl_agentic.sandbox.base import Process as Process
from torchrl_agentic.sandbox.base import Sandbox as Sandbox
from torchrl_agentic.sandbox.base import SandboxResult as SandboxResult
from torchrl_agentic.sandbox.bubblewrap import BubblewrapSandbox as BubblewrapSandbox
from torchrl_agentic.sandbox.forkserver_sandbox import ForkServerSandbox as ForkServerSandbox
from torchrl_agentic.sandbox.landlock import LandlockSandbox as LandlockSandbox
from torchrl_agentic.sandbox.remote.docker import DockerSandbox as DockerSandbox
from torchrl_agentic.sandbox.remote.e2b import E2BSandbox as E2BSandbox
from torchrl_agentic.sandbox.remote.modal import ModalSandbox as ModalSandbox
from torchrl_agentic.sandbox.resource_limits import ResourceLimits as ResourceLimits
from torchrl_agentic.sandbox.seatbelt import SeatbeltSandbox as SeatbeltSandbox
from torchrl_agentic.sandbox.tiers import default_sandbox as default_sandbox
from torchrl_agentic.sandbox.unsafe import UnsafeSubprocessSandbox as UnsafeSubprocessSandbox

__all__: list[str]
