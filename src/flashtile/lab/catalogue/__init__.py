"""Models, GPUs and clusters by name, with their real figures, from the data files in this folder."""

from flashtile.lab.catalogue.chip import Chip, chips, known_as
from flashtile.lab.catalogue.cluster import Cluster, clusters
from flashtile.lab.catalogue.model import Model, length, models

__all__ = ["Chip", "Cluster", "Model", "chips", "clusters", "known_as", "length", "models"]
