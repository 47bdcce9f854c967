"""``python -m sidecars.archive`` is ``wald-archive``."""

from sidecars.archive.command import main

main()
