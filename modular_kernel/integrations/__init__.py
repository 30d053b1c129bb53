"""Interfaces to other libraries: transformers, vLLM, SGLang, and functions under their names."""
