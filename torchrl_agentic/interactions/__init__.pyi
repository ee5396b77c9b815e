from torchrl_agentic.interactions.adapters import FunctionUser as FunctionUser
from torchrl_agentic.interactions.adapters import Gsm8kInteraction as Gsm8kInteraction
from torchrl_agentic.interactions.adapters import ScriptedUser as ScriptedUser
from torchrl_agentic.interactions.adapters import VerlInteraction as VerlInteraction
from torchrl_agentic.interactions.adapters import as_interaction as as_interaction
from torchrl_agentic.interactions.base import Interaction as Interaction
from torchrl_agentic.interactions.base import Reply as Reply
from torchrl_agentic.interactions.base import in_thread as in_thread
