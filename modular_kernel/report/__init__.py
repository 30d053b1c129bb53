"""`mk report`: the support matrix and benchmark results as HTML and Markdown pages.

`pages.document` defines the document model, which `markdown` and `pages.html` render. Documents
depend only on the parts and records: the same input gives the same bytes on any machine.
"""
