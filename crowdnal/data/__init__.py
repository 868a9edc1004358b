"""The data contract: `Annotations`, what reads and joins them, and a data set that gives them beside its samples."""

from crowdnal.data._answers import Answers
from crowdnal.data._columns import Column
from crowdnal.data._dynamic import mark_batch
from crowdnal.data._fields import Fields
from crowdnal.data._files import Reading, describe_file
from crowdnal.data._gold import as_gold, read_labels
from crowdnal.data._labels import USUAL, encode
from crowdnal.data._long import Long
from crowdnal.data._readers import long_fields, read_answers
from crowdnal.data._table import Table
from crowdnal.data._text import read_lines
from crowdnal.data._vocabulary import Ids, Vocabulary, distinct, in_natural_order, restore_vocabulary
from crowdnal.data.annotations import Annotations
from crowdnal.data.batches import as_annotations, collate, concat, of_classes
from crowdnal.data.dataset import CrowdDataset

__all__ = [
    "USUAL",
    "Annotations",
    "Answers",
    "Column",
    "CrowdDataset",
    "Fields",
    "Ids",
    "Long",
    "Reading",
    "Table",
    "Vocabulary",
    "as_annotations",
    "as_gold",
    "collate",
    "concat",
    "describe_file",
    "distinct",
    "encode",
    "in_natural_order",
    "long_fields",
    "mark_batch",
    "of_classes",
    "read_answers",
    "read_labels",
    "read_lines",
    "restore_vocabulary",
]
