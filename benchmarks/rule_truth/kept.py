"""Studies kept in a folder, a file for each op of the database: a run goes on where it ended, slices share it."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rule_truth.study import Counts, Judged, OpStudy


@dataclass(frozen=True)
class Kept:
    """``settings`` are what a study depends on besides the op: one made under others is not taken."""

    folder: Path
    settings: dict[str, Any]

    def read(self, name: str) -> OpStudy | None:
        """None when the op was not studied yet, or under other settings."""
        path = self._path(name)
        made = json.loads(path.read_text("utf-8")) if path.exists() else None
        return _study(made["study"]) if made is not None and made["settings"] == self.settings else None

    def write(self, study: OpStudy) -> None:
        """At once: a reader finds a whole file or none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(study.name)
        begun = path.with_suffix(f".{os.getpid()}")
        made = {**vars(study), "judged": [asdict(judged) for judged in study.judged]}
        begun.write_text(json.dumps({"settings": self.settings, "study": made}), "utf-8")
        begun.replace(path)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _study(made: dict[str, Any]) -> OpStudy:
    lines: list[dict[str, Any]] = [{key: tuple(value) if isinstance(value, list) else value
                                    for key, value in one.items()} for one in made["judged"]]
    judged = [Judged(**{**one, "counts": Counts(**one["counts"])}) for one in lines]
    return OpStudy(made["name"], made["num_samples"], judged, Counter(made["left_out"]), made["seconds"])
