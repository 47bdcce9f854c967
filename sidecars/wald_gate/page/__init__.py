"""Pages for a browser: HTML, live by Server-Sent Events.

A page works without JavaScript. With it, each page requests its own address again as an event stream, and the gate
sends the parts that have changed. A part is a block of the template whose name begins with ``live_``, inside an element
with that name as its id. No page has inline scripts or styles or refers to another site, and the headers forbid all.

All text passes :func:`wald_gate.page.frame.visible`: it is escaped as HTML, and characters that do not print are
written as escapes.

To add a view: a place in ``frame``, which makes its link; a row in ``views``; a template that extends ``frame.html``;
and a handler that ends with ``await page(call, template, facts)``, or ``await live_page(call, template, facts)`` with
a function of the newest snapshot.
"""
