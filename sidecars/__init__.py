"""Programs beside the daemon: each looks at the directory, plans, and applies its plan.

    wald-reclaim    deletes a complete segment once everybody has read it
    wald-drain      feeds a route to a command, and moves the cursor when the command has succeeded
    wald-archive    packs a route into bundles that tar and sha256sum can check, and moves the cursor last
    spark           a data source, and the jobs wald-export, wald-compact and wald-audit

None imports another, but for two: spark uses the modules of archive for bundles, and ``wald-archive --engine spark``
starts spark. They meet the daemon in the directory only: they read what the reading half of ``wald.store`` reads, and
write the files that are theirs (README, "The files").
"""
