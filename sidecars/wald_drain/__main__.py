"""``python -m wald_drain`` is ``wald-drain``."""

from wald_drain.command import main

main()
