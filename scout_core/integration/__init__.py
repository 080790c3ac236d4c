"""Attach SCOUT to a training process: the Framework protocol, the session, plain PyTorch."""
