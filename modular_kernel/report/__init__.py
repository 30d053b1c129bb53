"""`mk report`: the support matrix and benchmark results as HTML and Markdown pages.

The modules of this package build documents, which are sequences of the blocks in `pages.document`.
`markdown` and `pages.html` render them. A document depends only on the parts and the records, so
its text is identical on every machine.
"""
