"""``python -m sidecars.drain`` is ``wald-drain``."""

from sidecars.drain.command import main

main()
