"""Models and GPUs by name, with their real figures, from the two data files in this folder."""

from flashtile.lab.catalogue.chip import Chip, chips, known_as
from flashtile.lab.catalogue.model import Model, length, models

__all__ = ["Chip", "Model", "chips", "known_as", "length", "models"]
