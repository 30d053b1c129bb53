"""`mk report`: what pairs with what and why not, and what was measured, as pages to read.

One document model (`document`), two forms of it (`markdown`, `page`). Everything is a function of
its arguments: the same parts and records give the same bytes on any machine.
"""
