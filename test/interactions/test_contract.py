"""Each kind of interaction keeps the promises of all."""

from helpers.simulated_users import AsyncClerk, Clerk, Shopper, eager, parrot

from torchrl_agentic.interactions import ScriptedUser
from torchrl_agentic.testing import InteractionContract


class TestScripted(InteractionContract):
    def make(self):
        return ScriptedUser(["one", "two"])


class TestScriptedWithRepliesOfTheRow(InteractionContract):
    kwargs = {"replies": ["mine"]}  # noqa: RUF012

    def make(self):
        return ScriptedUser()


class TestOneWithState(InteractionContract):
    kwargs = {"goal": "milk"}  # noqa: RUF012

    def make(self):
        return Shopper()


class TestFunction(InteractionContract):
    def make(self):
        return parrot


class TestAsyncFunction(InteractionContract):
    kwargs = {"goal": "milk", "other": 1}  # noqa: RUF012

    def make(self):
        return eager


class TestVerl(InteractionContract):
    kwargs = {"goal": "milk"}  # noqa: RUF012

    def make(self):
        return Clerk({})


class TestAsyncVerl(TestVerl):
    def make(self):
        return AsyncClerk({})
