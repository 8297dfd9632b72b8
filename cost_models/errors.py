"""The root of the exception tree.

It lives in the lowest package, which imports nothing of ours, so that one ``except`` catches everything we raise;
`autoparallel.errors` draws the whole tree.
"""


class AutoparallelError(Exception):
    """Anything that this project raises on purpose."""


class ClusterError(AutoparallelError, ValueError):
    """A cluster name or description that cannot be used: unknown name, missing unit, impossible device count."""


class TimelineError(AutoparallelError, ValueError):
    """Tasks that cannot be simulated: a negative duration, an unknown predecessor, a cycle."""
