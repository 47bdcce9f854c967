"""Drain: feeds a route to a command, and moves the group's cursor when the command has succeeded.

    taken       up to N records behind the cursor, what has arrived; it never waits for more to fill a batch
    tried       the command gets them on its stdin; exit 0 is success, anything else is tried again after a pause
    halved      what has failed a few times, until the record that fails stands alone
    processed   the cursor moves; a crash before that means that the command gets these records once more
    given up    if so asked, after the last try of a record alone: it goes to the dead-letter route, is durable there,
                and then the cursor moves; redrive puts it back

So the command gets every record at least once, and in order; a record given up is in the dead-letter route once.
"""
