"""Puts `chats` within reach of the tests here, and of the worker processes that they start."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
