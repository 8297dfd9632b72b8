"""Whether a joint search with training state in a tier is worth its time: by bounds, then by estimates."""

from __future__ import annotations

from autoparallel import clock
from autoparallel.partition import Splits
from autoparallel.planning.joint_candidates import JointSearch, kept_of
from autoparallel.planning.joint_plan import fixed_by
from autoparallel.planning.options import Options
from cost_models import Cluster

#: The share of the time limit in which combinations are estimated.
ESTIMATING = 0.25


class TierBounds:
    """Of one program on one cluster, on any mesh, or on that of ``mesh_shape``."""

    def __init__(self, split: Splits, cluster: Cluster, mesh_shape: tuple[int, ...] | None) -> None:
        self.split, self.cluster, self.mesh_shape = split, cluster, mesh_shape

    def may_fit(self, options: Options) -> bool:
        """Whether a combination is left by the bounds of their memory."""
        search = self._search(options)
        return any(map(search.bounds.may_fit, search.space.first_round()))

    def may_beat(self, options: Options, seconds: float) -> bool:
        """Whether some combination may take less than so many seconds a step: by work that is divided evenly over all
        devices, then by estimates on the reduced-depth model, as the joint search makes them."""
        search = self._search(options)
        search.known_s = seconds
        may_fit = [c for c in search.space.first_round() if search.bounds.may_fit(c)]
        bounds = search.bounds
        least_s = min((max(bounds.work_s(c) / c.hybrid.pipeline_ranks, bounds.fetch_s(c.hybrid))
                       + bounds.host_update(c.hybrid).whole_s for c in may_fit), default=float("inf"))
        if least_s >= seconds:
            return False
        found = search.run(clock.now() + ESTIMATING * options.time_limit_s)
        return any(candidate.estimate_s < seconds for candidate in found.candidates)

    def _search(self, options: Options) -> JointSearch:
        fixed = fixed_by(options, self.mesh_shape, self.cluster)
        return JointSearch(self.split.graph, self.cluster, fixed, options.optimizer,
                           options.limit_bytes(self.cluster), wider_limits=options.wider_limits(self.cluster),
                           kept=kept_of(self.split, self.cluster, options))


__all__ = ["TierBounds"]
