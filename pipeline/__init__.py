"""The batch pipeline: stages over stores, without Dask, argument parsing or environment."""
