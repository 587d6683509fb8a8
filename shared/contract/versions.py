"""The protocol version between agents and coordinators; docs/architecture.md has the compatibility rule."""

PROTOCOL = 3
OLDEST_AGENT = 0  # oldest agent protocol this release of the coordinator accepts
HEADER = "DisTrans-Protocol"  # on every agent request and every coordinator response
UNVERSIONED = 0  # releases that predate the header
VERDICTS_SINCE = 2  # coordinators of this version and later take paired counts with an evaluation


def read_version(text: str | None) -> int | None:
    """Parse the header: UNVERSIONED without one, None for a value that no release sends."""
    if text is None:
        return UNVERSIONED
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else None


def who_upgrades(coordinator: int, agent: int) -> str:
    """Return a message with both versions that says which side to upgrade."""
    side = "agent" if agent < coordinator else "coordinator"
    return f"The coordinator speaks protocol {coordinator}, this agent {agent}: upgrade the {side}."
