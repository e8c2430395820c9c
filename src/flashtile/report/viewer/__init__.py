"""The tile viewer: real traces, recorded with all their numbers, replayed in the page."""

from flashtile.report.viewer.fragment import fragment
from flashtile.report.viewer.scenes import scenes

__all__ = ["fragment", "scenes"]
