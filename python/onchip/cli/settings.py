"""Settings that a command must not work around."""

import onchip
from onchip.errors import Unsupported


def refuse_wrong_settings(command: str) -> None:
    """For commands that take every backend that is here: a wrong setting takes one away that is,
    and what they then say is less than it looks."""
    problems = onchip.describe()["setting_problems"]
    if problems:
        raise Unsupported(f"{command}: {'; '.join(problems)}")
