"""The names of `reshard.state_dict`, under the name that this package had in earlier releases."""

from reshard.state_dict import (
    Cast as Cast,
    FqnEntry as FqnEntry,
    FqnMap as FqnMap,
    Normalized as Normalized,
    NormalizeReport as NormalizeReport,
    OptimizerReport as OptimizerReport,
    SetReport as SetReport,
    Stage as Stage,
    StateDictOptions as StateDictOptions,
    fqn_map as fqn_map,
    get_model_state_dict as get_model_state_dict,
    get_optimizer_state_dict as get_optimizer_state_dict,
    get_state_dict as get_state_dict,
    iter_full as iter_full,
    normalize as normalize,
    set_model_state_dict as set_model_state_dict,
    set_optimizer_state_dict as set_optimizer_state_dict,
    set_state_dict as set_state_dict,
)
