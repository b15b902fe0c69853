"""Encoders: networks, objectives, the training loop and the saved artefact."""
