"""Streams, events and the copies between pinned host rows and the GPU. Torch and Triton only."""
