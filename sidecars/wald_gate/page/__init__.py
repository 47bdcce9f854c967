"""The page: what an operator sees in a browser, made by the gate as HTML, and live by Server-Sent Events.

It works as a picture without JavaScript. With it, each page asks for its own address once more as an event stream, and
the gate sends the parts that have changed. A part is a block of the template whose name begins with ``live_``, inside
an element with that name as its id. Nothing on a page is a script, a style or an address of somewhere else, and the
headers forbid all of it.

All that is shown passes :mod:`wald_gate.page.visible`: it is escaped as HTML, and what does not print is written out.

To add a view: a place in ``places``, which makes its link; a row in ``table``; a template that extends ``frame.html``;
and a handler that ends with ``await page(call, template, facts)``, or ``await live_page(call, template, facts)`` where
``facts`` is a function of the newest picture of the log. Both are in ``frame``.

    table        which pages there are
    places       the views that the navigation names
    frame        a page as HTML, with the headers that bound what it may do; live pages; errors as pages
    changes      what of a live page has changed since it was sent
    assets       the style and the script
    login        a token typed into a form, and a session for it
    visible      text of strangers, so that all of it can be seen
    picture      the log at one moment, as pages show it
    archived     what of the log is in archives
    watching     takes pictures while there are viewers
    strip        the log as a strip of segments, and where on it head and cursors are
    overview     the log at a glance
    records      records of a route from a position on, or the newest, live
    record       the page of one sequence
    values       bytes of a record as text, JSON or hexadecimal
    history      what happened to the log
    routes       routes and their groups, and why they pin what
    letters      where records go that are given up
"""
