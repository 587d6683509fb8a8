"""The version of the protocol between agents and coordinators; docs/architecture.md has the rule of compatibility."""

PROTOCOL = 1
OLDEST_AGENT = 0  # the oldest protocol of agents that a coordinator of this release serves
HEADER = "DisTrans-Protocol"  # in every request of an agent and every answer of a coordinator
UNVERSIONED = 0  # releases before the header


def read_version(text: str | None) -> int | None:
    """Return the version in a header; None for one that no release sends. Without a header it is UNVERSIONED."""
    if text is None:
        return UNVERSIONED
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else None


def who_upgrades(coordinator: int, agent: int) -> str:
    """Name the two versions; the older side has to be upgraded."""
    side = "agent" if agent < coordinator else "coordinator"
    return f"The coordinator speaks protocol {coordinator}, this agent {agent}: upgrade the {side}."
