"""A tool of the demo: a typed and documented function."""

import asyncio

CAPITALS = {"France": ("Paris", 2_103_000), "Japan": ("Tokyo", 14_178_000), "Kenya": ("Nairobi", 4_397_000)}


async def capital(country: str) -> dict[str, str | int]:
    """Look up the capital of a country and how many people live there.

    Args:
        country: The country's English name.
    """
    await asyncio.sleep(0.05)  # the delay of a service
    if country not in CAPITALS:
        return {"error": f"no data on {country}", "known": ", ".join(CAPITALS)}
    name, people = CAPITALS[country]
    return {"capital": name, "inhabitants": people}
