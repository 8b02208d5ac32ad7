"""Prefix caching at any token for Gated DeltaNet hybrid models in SGLang."""
