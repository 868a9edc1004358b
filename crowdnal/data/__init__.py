"""The data contract: `Annotations`, what reads and joins them, and a data set that gives them beside its samples."""

from crowdnal.data._select import concat
from crowdnal.data._vocabulary import Ids, Vocabulary, distinct
from crowdnal.data.annotations import Annotations, as_annotations, collate
from crowdnal.data.dataset import CrowdDataset

__all__ = ["Annotations", "CrowdDataset", "Ids", "Vocabulary", "as_annotations", "collate", "concat", "distinct"]
