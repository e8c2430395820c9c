"""The tile viewer: real traces, recorded with all their numbers and replayed in the page."""

from flashtile.lab.report.viewer.fragment import fragment
from flashtile.lab.report.viewer.scenes import scenes

__all__ = ["fragment", "scenes"]
