"""Plans written down for other frameworks, and theirs read. See README.md."""

from autoparallel.export.exported import FORMATS, Exported, export_plan
from autoparallel.export.imported import Imported, import_plan

__all__ = ["FORMATS", "Exported", "Imported", "export_plan", "import_plan"]
