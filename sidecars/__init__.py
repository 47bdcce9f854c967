"""Programs beside the daemon: each looks at the directory, plans, and applies its plan; none of them knows another.

    wald-reclaim    deletes a complete segment once everybody has read it
    wald-drain      feeds a route to a command, and moves the cursor when the command has succeeded
    wald-archive    packs a route into bundles that tar and sha256sum can check, and moves the cursor last

They meet the daemon in the directory only: they read what the reading half of ``wald.store`` reads, and write the
files that are theirs (README, "The files").
"""
