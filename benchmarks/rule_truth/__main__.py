"""``python -m benchmarks.rule_truth [OPS...]``: sharding rules held to the ops themselves, beside DTensor's."""

from __future__ import annotations

from benchmarks.rule_truth.main import main

if __name__ == "__main__":
    main()
