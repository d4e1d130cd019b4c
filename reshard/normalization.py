"""The names of `reshard.state_dict`, under the name that this package had in earlier releases."""

from reshard.state_dict import Cast as Cast
from reshard.state_dict import FqnEntry as FqnEntry
from reshard.state_dict import FqnMap as FqnMap
from reshard.state_dict import Normalized as Normalized
from reshard.state_dict import NormalizeReport as NormalizeReport
from reshard.state_dict import OptimizerReport as OptimizerReport
from reshard.state_dict import SetReport as SetReport
from reshard.state_dict import Stage as Stage
from reshard.state_dict import StateDictOptions as StateDictOptions
from reshard.state_dict import fqn_map as fqn_map
from reshard.state_dict import get_model_state_dict as get_model_state_dict
from reshard.state_dict import get_optimizer_state_dict as get_optimizer_state_dict
from reshard.state_dict import get_state_dict as get_state_dict
from reshard.state_dict import iter_full as iter_full
from reshard.state_dict import normalize as normalize
from reshard.state_dict import set_model_state_dict as set_model_state_dict
from reshard.state_dict import set_optimizer_state_dict as set_optimizer_state_dict
from reshard.state_dict import set_state_dict as set_state_dict
