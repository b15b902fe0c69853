"""Stages: stores in, store out, one Stage value each."""
