from torchrl_agentic.trajectory.columns import Column as Column
from torchrl_agentic.trajectory.episode import Episode as Episode
from torchrl_agentic.trajectory.episode import OpenTurn as OpenTurn
from torchrl_agentic.trajectory.episode import Stage as Stage
