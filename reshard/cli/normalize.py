"""`reshard normalize`: a checkpoint under canonical names, whatever framework wrote it."""

from __future__ import annotations

from typing import Any

from reshard.cli.arguments import AsJson, Depth, HintOption, Select, Source, Step, newest, read_hints
from reshard.cli.output import PrintedLeaf, counted, print_json, print_text, print_tree, short, size
from reshard.errors import format_names


def normalize(
    path: Source,
    select: Select = None,
    hint: HintOption = None,
    depth: Depth = None,
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Show the model and optimizer of a checkpoint under canonical names.

    Shows names without the prefixes of wrappers, and tensors without padding. Splits stacked tensors and flat
    shards. Reads metadata only. To write the result, use convert --normalized.
    """
    import reshard
    from reshard.checkpoint import chosen
    from reshard.live.tree import map_leaves

    hints = read_hints(hint)
    checkpoint = reshard.open(newest(path, step))
    state = checkpoint.normalized(hints)
    model, moments = state["model"], state["optim"]["state"]
    if select:
        kept = chosen(list(dict.fromkeys([*model, *moments])), select, checkpoint.url)
        for each in (model, moments):
            for fqn in [fqn for fqn in each if fqn not in kept]:
                del each[fqn]
    if as_json:
        shown = {"notes": state.notes, "omitted": state.omitted, **map_leaves(_plain, state)}
        print_json({"path": checkpoint.url, "format": checkpoint.format, **shown})
        return
    print_text(f"format {checkpoint.format}", checkpoint.url, "bold")
    leaves: dict[Any, PrintedLeaf] = {("model", *fqn.split(".")): _leaf(tensor) for fqn, tensor in model.items()}
    for fqn, of in moments.items():
        for name, value in of.items():
            leaves[("optim", "state", *fqn.split("."), name)] = _leaf(value)
    for i, group in enumerate(state["optim"]["param_groups"]):
        shown = {k: v for k, v in group.items() if k != "params"}
        leaves[("optim", "param_groups", str(i))] = PrintedLeaf(
            f"{counted(len(group.get('params', ())), 'parameter')}, {short(shown, 90)}"
        )
    lost = [f"not shown (not part of the model or optimizer): {format_names(state.omitted)}"]
    print_tree(leaves, depth, [*state.notes, *(lost if state.omitted else ())])


def _leaf(value: Any) -> PrintedLeaf:
    if hasattr(value, "nbytes"):
        text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}  {size(value.nbytes)}"
        return PrintedLeaf(text, value.nbytes)
    return PrintedLeaf(f"= {short(value)}")


def _plain(_: Any, value: Any) -> Any:
    if hasattr(value, "nbytes"):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "nbytes": value.nbytes}
    return value
