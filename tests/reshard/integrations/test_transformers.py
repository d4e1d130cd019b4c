"""transformers' Trainer with our checkpoints: sharded over two processes, resumed there and in other layouts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from reshard.errors import CheckpointNotFoundError, KeyMismatchError, ReshardError
from reshard.native.manifest import MANIFEST
from tests import gloo
from tests.same import same
from tests.torch_releases import FSDP2_TRAINS_ON_CPUS, requires

for package in ("transformers", "accelerate", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytestmark = [pytest.mark.gloo, pytest.mark.filterwarnings("ignore")]  # of the framework: not ours to mend


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sixteen examples: four steps of four."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * (index + 3)) % 53
        return {"input_ids": tokens, "labels": tokens}


def trainer(folder: Path, steps: int, *, lora: bool = False, run: str = "run", kind: Any = None, **sizes: int) -> Any:
    """A Trainer on the ranks there are, of the model in `folder / "tiny"`, which transformers shards by `sizes`."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM, TrainingArguments
    from transformers.distributed import DistributedConfig

    from reshard.integrations.transformers import ReshardTrainer

    torch.manual_seed(0)
    how = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model: Any = LlamaForCausalLM.from_pretrained(folder / "tiny", **how)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj", "up_proj"]))
    args = TrainingArguments(
        output_dir=str(folder / ("lora" if lora else run)), max_steps=steps, save_steps=2, use_cpu=True,
        per_device_train_batch_size=4 if sizes.get("fsdp_size", 1) == 1 else 2, learning_rate=0.01, report_to=[],
        disable_tqdm=True, logging_strategy="no", seed=3,
    )  # fmt: skip
    return (kind or ReshardTrainer)(model=model, args=args, train_dataset=Tokens())


def derived(**given: Any) -> Any:
    """A Trainer whose arguments are in another order, such as TRL's for DPO and GRPO."""
    from transformers import Trainer

    from reshard.integrations.transformers import ReshardTrainer

    class Other(Trainer):
        def __init__(self, model: Any, reference: Any = None, args: Any = None, **options: Any) -> None:
            assert reference is None
            super().__init__(model, args, **options)

    class Ours(ReshardTrainer, Other):
        pass

    return Ours(given.pop("model"), **given)


def whole(trainer: Any) -> Any:
    """Model, optimizer and schedule as they are now."""
    options = reshard.StateDictOptions(full_state_dict=True)
    states = reshard.get_state_dict(trainer.model, trainer.optimizer.optimizer, options=options)
    return [*states, trainer.lr_scheduler.state_dict()]


def sharded(text: str) -> dict[str, Any]:
    """On one of two ranks: without a break, with one, under DDP with nothing left to do, and from a Trainer's DDP."""
    from transformers import Trainer

    folder, found = Path(text), {}
    for lora in (False, True):
        straight = trainer(folder, 4, lora=lora, fsdp_size=2)
        straight.train()  # saves after steps 2 and 4
        run = Path(straight.args.output_dir)
        cut = trainer(folder, 4, lora=lora, fsdp_size=2)
        cut.train(resume_from_checkpoint=str(run / "checkpoint-2"))
        kinds = {type(parameter).__name__ for parameter in cut.model.parameters()}
        found[run.name] = (kinds, whole(straight), same(whole(straight), whole(cut)))
    replicated = trainer(folder, 4)
    replicated.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-4"))
    other = trainer(folder, 4, run="other", kind=derived, fsdp_size=2)
    other.train()
    found["derived"] = same(found["run"][1], whole(other)) and (folder / "other" / "checkpoint-4" / MANIFEST).exists()
    stock = trainer(folder, 4, run="stock", kind=Trainer)
    stock.train()
    moved = trainer(folder, 4, run="stock", fsdp_size=2)
    moved.train(resume_from_checkpoint=str(folder / "stock" / "checkpoint-4"))
    found["stock"] = same(whole(stock), whole(moved))
    return {**found, "ddp": same(found["run"][1], whole(replicated))}


@pytest.mark.host_only("the Trainer trains on the device that it is told, here the CPU, and refuses losses on others")
@requires(FSDP2_TRAINS_ON_CPUS, "trains nothing under FSDP2 on CPUs")
def test_sharded_training_goes_on(tmp_path: Path) -> None:
    """Bit for bit where it began, dropout of the adapters included; within rounding on one process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 54}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, use_cache=False, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")

    for found in gloo.run(sharded, 2, str(tmp_path)):
        (kinds, wanted, is_same), (lora_kinds, _, is_same_lora) = found["run"], found["lora"]
        assert (kinds, lora_kinds) == ({"DTensor"}, {"DTensor", "Parameter"})
        assert [is_same, is_same_lora, found["ddp"], found["stock"], found["derived"]] == [True] * 5
    adapters = reshard.open(tmp_path / "lora")
    assert all(".lora_" in key for key in adapters if key.startswith("model."))

    (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").unlink()  # as if it had not come to that
    one = trainer(tmp_path, 4)
    one.train(resume_from_checkpoint=True)

    model, optim, schedule = whole(one)
    torch.testing.assert_close(model, dict(wanted[0]))
    torch.testing.assert_close(optim["state"], dict(wanted[1]["state"]))
    assert schedule == wanted[2]
    assert reshard.open(tmp_path / "run").objects["scheduler.last_epoch"] == 4
    check_the_rest(one, tmp_path)


def check_the_rest(one: Any, folder: Path) -> None:
    """The best model, models alone, and what is refused."""
    best = {name: tensor.clone() for name, tensor in one.model.state_dict().items()}
    torch.nn.init.zeros_(one.model.lm_head.weight)
    one.state.best_model_checkpoint = str(folder / "run" / "checkpoint-4")
    one._load_best_model()
    assert same(best, dict(one.model.state_dict()))

    groups, rates = one.optimizer.optimizer.param_groups, one.lr_scheduler.base_lrs
    rates[:] = range(1, len(rates) + 1)
    one._save_optimizer_and_scheduler(str(folder / "order"))
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
    one._load_optimizer_and_scheduler(str(folder / "order"))
    assert one.lr_scheduler.base_lrs[:2] == [2, 1]
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]

    one.lr_scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer.optimizer, 2)
    with pytest.raises(KeyMismatchError, match="scheduler: the saved settings have other names than those of this St"):
        one._load_optimizer_and_scheduler(str(folder / "run" / "checkpoint-4"))

    with pytest.raises(OSError, match="no file named"):  # it must not return a model that it initialized
        type(one.model).from_pretrained(folder / "run" / "checkpoint-4")
    reshard.convert(folder / "run" / "checkpoint-4", folder / "hf", format="safetensors", model_only=True)
    shutil.copy(folder / "run" / "checkpoint-4" / "config.json", folder / "hf")
    assert same(best, dict(type(one.model).from_pretrained(folder / "hf").state_dict()))

    one.args.output_dir, one.args.save_only_model = str(folder / "alone"), True
    with pytest.raises(CheckpointNotFoundError, match="on the first run, pass resume_from_checkpoint=False"):
        one.train(resume_from_checkpoint=True)
    one._save_checkpoint(one.model, None)
    assert all(key.startswith("model.") for key in reshard.open(folder / "alone"))
    with pytest.raises(KeyMismatchError, match="has nothing under 'optim'"):
        one.train(resume_from_checkpoint=True)
    one.is_deepspeed_enabled = True
    with pytest.raises(ReshardError, match="DeepSpeed's engine saves its own checkpoints"):
        one.train()


@pytest.mark.parametrize("kind", ["DoRA", "IA3", "prompts", "tokens"])
def test_any_kind_of_adapter_loads_from_the_files_of_peft(kind: str, tmp_path: Path) -> None:
    """PEFT itself converts the names, and reads what is converted for it."""
    from peft import (
        IA3Config,
        LoraConfig,
        PeftModel,
        PromptTuningConfig,
        get_peft_model,
        get_peft_model_state_dict as names_of_files,
        set_peft_model_state_dict as names_of_model,
    )
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config: Any = {
        "DoRA": LoraConfig(r=2, use_dora=True, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "prompts": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "tokens": LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2]),
    }[kind]

    def model() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=54, num_key_value_heads=2, **size))

    trained = get_peft_model(model(), config)
    for parameter in trained.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    want = {name: tensor.detach().clone() for name, tensor in names_of_files(trained).items()}
    trained.save_pretrained(tmp_path / "adapter")

    again = get_peft_model(model(), config)
    state = names_of_files(again)
    reshard.load(state, tmp_path / "adapter")
    names_of_model(again, state)
    assert same(names_of_files(again), want)

    reshard.save(names_of_files(again), tmp_path / "ours")
    reshard.convert(tmp_path / "ours", tmp_path / "back", format="safetensors")
    (tmp_path / "back" / "model.safetensors").rename(tmp_path / "back" / "adapter_model.safetensors")
    shutil.copy(tmp_path / "adapter" / "adapter_config.json", tmp_path / "back")
    assert same(names_of_files(PeftModel.from_pretrained(model(), tmp_path / "back")), want)
