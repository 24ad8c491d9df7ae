"""Short explanations of mixed-precision concepts for `halfstep explain TOPIC`.

Numbers are computed from `halfstep.precision.formats` and the defaults of `LossScale`, so that the text cannot drift from what
the library does, or are those of a named record in docs/ or benchmarks/results/.
"""

from halfstep.report.topics.catalog import TOPICS, explain
from halfstep.report.topics.topic import Topic

__all__ = ["TOPICS", "Topic", "explain"]
