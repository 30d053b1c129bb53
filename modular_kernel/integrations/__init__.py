"""Interfaces to transformers, vLLM and SGLang, and functions with the names of their APIs."""
