"""Kernels: arrays in, arrays out; no paths, no configuration, no logging."""
