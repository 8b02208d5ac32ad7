"""The one error that an operator sees."""


class TailReplayError(ValueError):
    """A setting, model or environment that Tail-Replay does not support; the message names it and the way out."""
