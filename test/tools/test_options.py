"""Options that a user wrote are checked by the signature of the class that gets them."""

from typing import Any

import pytest

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.tools.options import OptionError, create


class Shop:
    """Has arguments of several types; nobody can write `sandbox` as plain data."""

    def __init__(self, sandbox: Any, sizes: tuple[int, ...] = (), rate: float = 1.0, name: str = "") -> None:
        if rate < 0:
            raise ValueError("rate must be 0 or more")
        if name == "closed":
            raise MissingExtra("a shop", "till", "shop")
        self.sandbox, self.sizes, self.rate = sandbox, sizes, rate


def test_options_and_given_arguments_reach_the_class():
    shop = create(Shop, {"sizes": [1, 2], "rate": 2}, sandbox="one")
    assert (shop.sandbox, shop.sizes, shop.rate) == ("one", [1, 2], 2)


@pytest.mark.parametrize(
    ("options", "steps", "words"),
    [
        ({"size": 1}, ("size",), "expected one of sizes, rate, name; did you mean 'sizes'"),
        ({"sandbox": 1}, ("sandbox",), "unknown key 'sandbox'"),
        ({"rate": "fast"}, ("rate",), "valid number; got fast"),
        ({"sizes": ["big"]}, ("sizes",), "valid integer"),
        ({"rate": -1}, ("rate",), r"rate must be 0 or more \(options: sizes, rate, name\)"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_fit(
    options: dict[str, Any], steps: tuple[str, ...], words: str
):
    with pytest.raises(OptionError, match=words) as caught:
        create(Shop, options, sandbox=None)
    assert caught.value.steps == steps


def test_a_missing_extra_stays_what_it_is():
    with pytest.raises(MissingExtra, match="till"):
        create(Shop, {"name": "closed"}, sandbox=None)
