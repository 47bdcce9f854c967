"""The generated parts of docs/, for scripts/make-docs: a function for each, which returns Markdown."""
