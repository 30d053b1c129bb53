"""The m-grouped product over an expert's segment of rows."""
