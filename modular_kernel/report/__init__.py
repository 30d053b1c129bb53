"""`mk report`: the support matrix and benchmark results as HTML and Markdown pages.

`pages.document` defines the document model, which `markdown` and `pages.html` render. A document
depends only on the parts and the records, so it has the same bytes on every machine.
"""
