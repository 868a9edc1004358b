"""Names of the methods, for type checkers and readers; one that is not named here is registered all the same."""

from crowdnal.objectives.bootstrap import SoftBootstrap as SoftBootstrap
from crowdnal.objectives.cmm.objective import CMM as CMM
from crowdnal.objectives.conal.em import CoNALEM as CoNALEM
from crowdnal.objectives.conal.objective import CoNAL as CoNAL
from crowdnal.objectives.crowd_layer import CrowdLayer as CrowdLayer
from crowdnal.objectives.dl_aggregate import DLAggregate as DLAggregate
from crowdnal.objectives.dl_ds import DLDS as DLDS
from crowdnal.objectives.dl_em import DLEM as DLEM
from crowdnal.objectives.dl_wc import DLWC as DLWC
from crowdnal.objectives.doctor_net import DoctorNet as DoctorNet
from crowdnal.objectives.feature_em import FeatureEM as FeatureEM
from crowdnal.objectives.geocrowdnet import GeoCrowdNet as GeoCrowdNet
from crowdnal.objectives.lia.multilabel import LIAML as LIAML
from crowdnal.objectives.lia.objective import LIA as LIA
from crowdnal.objectives.majority import MajorityVote as MajorityVote
from crowdnal.objectives.majority import SoftMajorityVote as SoftMajorityVote
from crowdnal.objectives.max_mig import MaxMIG as MaxMIG
from crowdnal.objectives.mbem import MBEM as MBEM
from crowdnal.objectives.overparametrized import OverparametrizedCrowdLayer as OverparametrizedCrowdLayer
from crowdnal.objectives.single_confusion import SingleConfusion as SingleConfusion
from crowdnal.objectives.trace import TraceRegularized as TraceRegularized
from crowdnal.objectives.union_net import UnionNet as UnionNet
from crowdnal.objectives.weighted_doctor_net import WeightedDoctorNet as WeightedDoctorNet
