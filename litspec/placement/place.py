"""`place`: loads a pair of checkpoints and puts it on devices, with Lightning Fabric."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy, ParallelStrategy
from litgpt.config import Config
from torch import Tensor

from litspec.checkpoint import Checkpoint, check_sizes
from litspec.engine.runner import CompiledRunner, Runner
from litspec.engine.target import Placed
from litspec.errors import InputError
from litspec.lifeline import env_int
from litspec.model import GPT
from litspec.placement.heartbeat import Heartbeat, LostRank, own_store
from litspec.placement.meeting import Meeting
from litspec.placement.replicate import Replica
from litspec.placement.sequential import load_sequential, split_pair
from litspec.placement.single import Single, load_model, load_quantized
from litspec.placement.tensor_parallel import Shard, TensorParallel, broadcast, load_shard
from litspec.types import DraftPlacementName, PlacementName, Quantize

DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}
# Positions whose keys and values are counted when layers are distributed; a longer text needs more.
COUNTED_POSITIONS = 8192
# Left free on every device for activations, the engine's buffers and fragmentation.
RESERVE_BYTES = 2**30


@dataclass(frozen=True)
class Part:
    """How one of the two models is loaded.

    Attributes:
        checkpoint: The checkpoint.
        dtype: Dtype of the weights.
        device: Device of the weights; None for the device of the rank.
        cut: Whether it is split across ranks.
        rows: Number of rows of its forwards.
        compiled: Whether its steps are compiled.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device | None = None
    cut: bool = False
    rows: int | None = None
    compiled: bool = False

    def bytes_on(self, rank: int, ranks: int) -> int:
        """Bytes of its weights on the rank's own device."""
        if self.device is not None:
            return 0
        part = Shard(self.checkpoint.config, rank, ranks).part if self.cut else None
        return weight_bytes(self.checkpoint.config, self.dtype, part)

    def load(self, device: torch.device, rank: int, ranks: int) -> GPT:
        """The model, or this rank's shard of it."""
        if self.cut:
            return load_shard(self.checkpoint, Shard(self.checkpoint.config, rank, ranks), device, self.dtype)
        return load_model(self.checkpoint, self.device or device, self.dtype, self.rows, self.compiled)


def place(
    target: Checkpoint,
    draft: Checkpoint | None,
    *,
    accelerator: str = "auto",
    devices: int | str | Sequence[int] = 1,
    num_nodes: int = 1,
    placement: PlacementName = "auto",
    precision: str | None = None,
    draft_precision: str | None = None,
    draft_device: str | None = None,
    draft_placement: DraftPlacementName = "replicated",
    quantize: Quantize | None = None,
    verify_width: int = 8,
    compile: bool = False,
) -> Placed:
    """Loads a pair and puts its weights on devices.

    With "tensor_parallel" and "replicate" on several devices there is one process per device. Processes that
    `torchrun`, `fabric run` or SLURM started connect here. Without a launcher the first process starts the others, by
    running its own command line again for each.

    Args:
        target: The target's checkpoint.
        draft: The draft model's checkpoint; None without one.
        accelerator: As in Lightning Fabric.
        devices: Number of devices per machine, or a list of them; "auto" for all. With the default of 1 all processes
            of a launcher are used.
        num_nodes: Number of machines.
        placement: "single": the pair on one device. "tensor_parallel": the target's layers split across all devices.
            "sequential": the target's layers in order over the devices of one process. "replicate": the pair on every
            device, for many prompts. "auto": single for one device, else tensor_parallel; with devices="auto" single
            if the pair fits on one.
        precision: Precision of the target's weights: "bf16-true", "16-true" or "32-true"; None for the device's best.
        draft_precision: Precision of the draft model's weights; None for the target's.
        draft_device: Device of the draft model, such as "cuda:1" or "cpu". None is the target's, or with "sequential"
            the device with the most free memory.
        draft_placement: With "tensor_parallel", whether every rank has the whole draft model ("replicated": no traffic)
            or the draft model is split like the target.
        quantize: Quantise the target's linear layers with bitsandbytes, as LitGPT does.
        verify_width: W, the most rows of a verification.
        compile: Compile the steps of target and draft model.

    Raises:
        InputError: A setting cannot be used, or a model cannot be split or does not fit.
    """
    _check_choice("placement", placement, PlacementName)
    _check_choice("draft_placement", draft_placement, DraftPlacementName)
    open_number = devices in ("auto", -1, "-1")
    if placement in ("single", "sequential"):
        if placement == "single" and open_number:
            devices = 1
        _check_alone(placement, num_nodes)
    else:
        devices, num_nodes = _launched(devices, num_nodes)
    fabric = _fabric(accelerator=accelerator, devices=devices, num_nodes=num_nodes)
    homes = fabric.strategy.parallel_devices if isinstance(fabric.strategy, ParallelStrategy) else None
    homes = homes or [fabric.device]
    ranks = len(homes) * num_nodes
    dtype = dtype_of(precision or os.environ.get("LT_PRECISION"), homes[0], "precision")
    if quantize is not None:
        _check_quantize(quantize, homes[0], placement, ranks)

    there = _draft_device(draft_device, 1 if placement == "sequential" else ranks)
    if compile:
        _check_compile(placement, quantize, draft_device)
    for checkpoint, rows in ((target, verify_width), (draft, 1)):
        if checkpoint is not None:
            _check_builds(checkpoint, rows)
    whole = Part(target, dtype, rows=verify_width, compiled=compile)
    small = None
    if draft is not None:
        small_dtype = (
            dtype if draft_precision is None else dtype_of(draft_precision, there or homes[0], "draft_precision")
        )
        small = Part(draft, small_dtype, there, rows=1, compiled=compile)

    if placement == "sequential":
        return _place_sequential(whole, small, homes, verify_width)
    if placement == "auto" and ranks > 1 and open_number and num_nodes == 1 and _fits(whole, small, homes[0]):
        fabric, ranks = _fabric(accelerator=accelerator, devices=1), 1
    if ranks == 1:
        _start(fabric)
        runner = _runner(fabric.device, compile)
        models = _load(whole, small, fabric.device, 0, 1, quantize)
        return Single(*models, fabric.device, verify_width, runner=runner)
    if placement == "single":
        raise InputError(
            f"placement 'single' uses one device, but devices = {devices!r} means {ranks}; choose 'tensor_parallel', "
            "'sequential' or 'replicate'."
        )

    cut = placement != "replicate"
    if cut and compile:
        _check_compile("tensor_parallel", quantize, draft_device)
    if cut:
        whole, small = _cut(whole, small, draft_placement, ranks)
    fabric, heartbeat = _launch(accelerator, devices, num_nodes, "tensor_parallel" if cut else placement, ranks)
    rank = fabric.global_rank
    models = _load(whole, small, fabric.device, rank, ranks, quantize)
    if cut:
        heartbeat.needed = False
        return TensorParallel(*models, fabric.device, verify_width, rank, ranks, heartbeat)
    runner = _runner(fabric.device, compile)
    return Replica(*models, fabric.device, verify_width, rank, ranks, runner, heartbeat=heartbeat)


def _runner(device: torch.device, compile: bool) -> Runner:
    return CompiledRunner(device) if compile else Runner()


def _check_compile(placement: str, quantize: str | None, draft_device: str | None) -> None:
    """Raises InputError for settings that compiled steps do not support."""
    if placement in ("tensor_parallel", "sequential"):
        raise InputError(
            "compile needs the whole pair on one device (placement 'single' or 'replicate'); it cannot be used with "
            f"placement {placement!r}."
        )
    if quantize is not None:
        raise InputError(f"compile cannot be used with quantised weights (quantize = {quantize!r}).")
    if draft_device is not None:
        raise InputError(
            f"compile needs target and draft model on one device; leave out draft_device = {draft_device!r}."
        )


def _cut(whole: Part, small: Part | None, draft_placement: str, ranks: int) -> tuple[Part, Part | None]:
    """The target, split across ranks, and the draft model, split too if `draft_placement` says so."""
    Shard(whole.checkpoint.config, 0, ranks).check(whole.checkpoint.role)
    if small is not None and draft_placement == "tensor_parallel":
        if small.device is not None:
            raise InputError(
                f"draft_device = {str(small.device)!r} needs draft_placement 'replicated'; a split draft model is on "
                "the target's devices."
            )
        Shard(small.checkpoint.config, 0, ranks).check("draft_dir")
        small = replace(small, cut=True)
    return replace(whole, cut=True), small


def _load(
    whole: Part, small: Part | None, device: torch.device, rank: int, ranks: int, quantize: str | None
) -> tuple[GPT, GPT | None]:
    """Target and draft model."""
    need = whole.bytes_on(rank, ranks) if quantize is None else 0
    _check_room(device, need + (small.bytes_on(rank, ranks) if small is not None else 0), ranks)
    if quantize is None:
        model = whole.load(device, rank, ranks)
    else:
        model = load_quantized(whole.checkpoint, device, whole.dtype, quantize)
    return model, small.load(device, rank, ranks) if small is not None else None


def _place_sequential(whole: Part, small: Part | None, homes: list[torch.device], verify_width: int) -> Single:
    ends, layers = layer_bytes(whole.checkpoint.config, whole.dtype)
    draft_bytes = small.bytes_on(0, 1) if small is not None else 0
    counts, index = split_pair(layers, ends, draft_bytes, [_room(device) for device in homes])
    model = load_sequential(whole.checkpoint, homes, counts, whole.dtype)
    draft_model = small.load(homes[index or 0], 0, 1) if small is not None else None
    return Single(model, draft_model, homes[0], verify_width)


# ---- processes ----


def process_rank() -> int:
    """The rank of this process, before and after the process group exists; 0 for a single process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    if TorchElasticEnvironment.detect():
        return env_int("RANK")
    if SLURMEnvironment.detect():
        return env_int("SLURM_PROCID")
    return env_int("LOCAL_RANK", 0) or env_int("NODE_RANK", 0)


def _launched(devices: int | str | Sequence[int], num_nodes: int) -> tuple[int | str | Sequence[int], int]:
    """The processes per machine and machines that a launcher started, unless `devices` or `num_nodes` is set."""
    if devices not in (1, "1") or num_nodes != 1:
        return devices, num_nodes
    return _by_launcher() or (devices, num_nodes)


def _by_launcher() -> tuple[int, int] | None:
    """The processes per machine and machines that a launcher started; None without one."""
    if TorchElasticEnvironment.detect():
        world = env_int("WORLD_SIZE")
        local = max(1, env_int("LOCAL_WORLD_SIZE", world))
        return local, world // local
    if SLURMEnvironment.detect():
        nodes = max(1, env_int("SLURM_NNODES", 1))
        return env_int("SLURM_NTASKS") // nodes, nodes
    return None


def _check_alone(placement: str, num_nodes: int) -> None:
    local, nodes = _by_launcher() or (1, 1)
    if (processes := local * nodes * num_nodes) > 1:
        raise InputError(
            f"placement {placement!r} uses one process on one machine, but there are {processes} processes; start it "
            "without a launcher, or choose 'tensor_parallel'."
        )


def _under_fabric_run() -> bool:
    return os.environ.get("LT_CLI_USED") == "1"


def _start(fabric: Fabric) -> None:
    """Sets up the device. With several processes, starts or connects to the others."""
    if not _under_fabric_run():  # there Fabric launches when it is constructed
        fabric.launch()


def _fabric(**settings: Any) -> Fabric:
    """Fabric, with its errors about settings as InputError."""
    if _under_fabric_run():
        # `fabric run` has its own flag for devices and requires that a script passes the same value or none.
        settings["devices"] = os.environ.get("LT_DEVICES", settings["devices"])
    try:
        return Fabric(**settings)
    except InputError:
        raise
    except Exception as error:  # also errors of an accelerator's own library
        names = [name for name in ("accelerator", "devices", "num_nodes") if name in settings]
        asked = ", ".join(f"{name} = {settings[name]!r}" for name in names)
        raise InputError(f"Lightning Fabric cannot provide {asked}: {' '.join(str(error).split())}") from error


def _launch(
    accelerator: str, devices: int | str | Sequence[int], num_nodes: int, placement: str, ranks: int
) -> tuple[Fabric, Heartbeat]:
    """Starts the other processes, or connects to those that a launcher started."""
    meets = not dist.is_initialized() and not _under_fabric_run()
    if dist.is_initialized():
        if dist.get_world_size() != ranks:
            raise InputError(
                f"placement {placement!r} needs {ranks} processes, but this process is already one of "
                f"{dist.get_world_size()}; load all models of a script on the same number of processes."
            )
    elif "LOCAL_RANK" not in os.environ and not SLURMEnvironment.detect():
        if hasattr(sys, "ps1") or sys.flags.interactive:
            raise InputError(
                f"placement {placement!r} on {ranks} devices needs {ranks} processes, which cannot be started from a "
                "notebook or an interactive session; use placement='sequential' here, or run a script."
            )
        import __main__

        if __main__.__spec__ is None and not os.path.isfile(sys.argv[0]):
            raise InputError(
                f"placement {placement!r} on {ranks} devices starts {ranks} processes by running the script again, but "
                f"{sys.argv[0]!r} is not a script; put the code in a file, or use placement='sequential'."
            )
    fabric = _fabric(accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=DDPStrategy())
    try:
        if not meets:  # the process group exists already, or Fabric creates it
            _start(fabric)
            return fabric, _heartbeat(fabric.global_rank, ranks)
        environment: Any = cast(DDPStrategy, fabric.strategy).cluster_environment
        environment.validate_settings(num_devices=ranks // num_nodes, num_nodes=num_nodes)
        heartbeat = _meet(Meeting(environment, ranks // num_nodes, num_nodes))
        _start(fabric)
    except (InputError, LostRank):
        raise
    except ValueError as error:  # the launcher has started a different number of processes
        raise InputError(f"placement {placement!r}: {' '.join(str(error).split())}") from error
    except (RuntimeError, KeyError) as error:
        raise LostRank.because(error) from error
    return fabric, heartbeat


_met: list[Heartbeat] = []


def _meet(meeting: Meeting) -> Heartbeat:
    """Starts the heartbeat with the rendezvous, as creating the process group would wait for a rank that is lost."""
    heartbeat = Heartbeat(meeting.rank, meeting.ranks, meeting.hold(), meeting.children)
    heartbeat.needed = True
    _met.append(heartbeat)
    return heartbeat


def _heartbeat(rank: int, ranks: int) -> Heartbeat:
    """The heartbeat of ranks that have connected before."""
    if not _met:
        device = "cpu" if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())
        store = own_store(rank, lambda value: int(broadcast(torch.tensor([value], device=device)).item()))
        _met.append(Heartbeat(rank, ranks, store))
    return _met[0]


# ---- precision ----


def dtype_of(precision: str | None, device: torch.device, name: str = "precision") -> torch.dtype:
    """The dtype of weights for one of Fabric's names of a precision; None is the device's best.

    Raises:
        InputError: Another precision, such as a mixed one: weights are stored in the dtype in which they are used.
    """
    if precision is None:
        precision = default_precision(device)
    if precision not in DTYPES:
        raise InputError(f"{name} must be one of {', '.join(DTYPES)}, got {precision!r}")
    return DTYPES[precision]


def default_precision(device: torch.device) -> str:
    """bf16-true if the device computes in it, else 16-true; 32-true on a CPU."""
    if device.type == "cuda":
        return "bf16-true" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-true"
    return "32-true" if device.type == "cpu" else "16-true"


def _check_quantize(quantize: str, device: torch.device, placement: str, ranks: int) -> None:
    _check_choice("quantize", quantize, Quantize)
    if device.type != "cuda":
        raise InputError(f"quantize = {quantize!r} needs a CUDA device, but the target is on {device.type!r}.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f"quantize = {quantize!r} needs bitsandbytes, which is not installed; run `pip install bitsandbytes`."
        )
    if placement == "sequential" or (ranks > 1 and placement != "replicate"):
        raise InputError(
            f"quantize = {quantize!r} needs placement 'single' or 'replicate'; it cannot be used with {placement!r} on "
            f"{ranks} devices."
        )


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise InputError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


# ---- memory ----


def weight_bytes(config: Config, dtype: torch.dtype, part: Callable[[str, Tensor], Tensor] | None = None) -> int:
    """Bytes of a model's weights, or of what `part` keeps of them."""
    with torch.device("meta"):
        weights = GPT(config).state_dict()
    return sum((w if part is None else part(name, w)).numel() for name, w in weights.items()) * dtype.itemsize


def layer_bytes(config: Config, dtype: torch.dtype) -> tuple[int, list[int]]:
    """Bytes of embedding, norm and head, and of each layer with its K/V cache for at most `COUNTED_POSITIONS`."""
    with torch.device("meta"):
        model = GPT(config)
        cache = model.make_cache(min(config.block_size, COUNTED_POSITIONS))
    per_block = [sum(p.numel() for p in block.parameters()) for block in model.transformer.h]
    ends = sum(p.numel() for p in model.parameters()) - sum(per_block)
    layers = [size + k.numel() + v.numel() for size, k, v in zip(per_block, cache.k, cache.v)]
    return ends * dtype.itemsize, [size * dtype.itemsize for size in layers]


def _check_builds(checkpoint: Checkpoint, rows: int) -> None:
    """Raises InputError if a config describes no valid model, or needs more memory than the machine has."""
    check_sizes(checkpoint)
    config = checkpoint.config
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if rows > config.block_size:
        raise InputError(
            f"verify_width must be at most the model's block_size of {config.block_size:,} positions, got {rows:,}."
        )
    wants = {
        f"block_size: {config.block_size:,}": 2 * 4 * config.block_size * config.rope_n_elem,  # cosines and sines
        # Logits, what the sampler makes of them, and the widest rows within the model.
        f"verify_width = {rows:,}": 4 * rows * (4 * config.padded_vocab_size + 4 * config.intermediate_size),
    }
    for what, need in wants.items():
        if need > room:
            raise InputError(
                f"{checkpoint.role} {str(checkpoint.dir)!r} with {what} needs {need / 1e9:.1f} GB, but this machine "
                f"has {room / 1e9:.1f} GB; give a smaller value."
            )
    try:
        with torch.device("meta"):
            GPT(config)
    except InputError:
        raise
    except Exception as error:  # inconsistent sizes can raise almost any exception
        raise InputError(
            f"{str(checkpoint.dir / 'model_config.yaml')!r} ({checkpoint.role}) does not describe a valid model: "
            f"{' '.join(str(error).split())[:200] or type(error).__name__}."
        ) from error


def _room(device: torch.device) -> int:
    """Bytes that weights may use on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] - RESERVE_BYTES
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _fits(whole: Part, small: Part | None, device: torch.device) -> bool:
    ends, layers = layer_bytes(whole.checkpoint.config, whole.dtype)
    return ends + sum(layers) + (small.bytes_on(0, 1) if small is not None else 0) <= _room(device)


def _check_room(device: torch.device, need: int, ranks: int) -> None:
    """Raises InputError before loading if the weights do not fit, instead of running out of memory later."""
    if device.type == "cuda" and need > (room := _room(device)):
        raise InputError(
            f"The weights need {need / 1e9:.1f} GB on {device}, which has room for {room / 1e9:.1f} GB; give more than "
            f"{ranks} device(s) with placement 'tensor_parallel' or 'sequential', or quantize."
        )


def _draft_device(draft_device: str | None, ranks: int) -> torch.device | None:
    """The device of the draft model; None for the target's."""
    if draft_device is None:
        return None
    try:
        device = torch.device(draft_device)
        if device.type == "meta":
            raise NotImplementedError("it stores no values")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"draft_device = {draft_device!r} is not a device of this machine: {why}") from error
    if ranks > 1 and device.type != "cpu":
        raise InputError(
            f"draft_device = {draft_device!r} is one device, but each of {ranks} processes drafts on its own; leave it "
            "out, or give 'cpu'."
        )
    return device
