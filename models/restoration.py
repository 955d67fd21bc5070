"""RestorationModel: one network, weighted losses, an optimizer and a moving average of the weights.

Semantics follow BasicSR's SRModel: the learning rate of step i is set before the step, the moving average is updated
after it, and validation uses the average where there is one.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from archs import ARCHS
from kernels import dispatch
from models.base import Base, Batch
from models.checkpoint import load_weights, read_checkpoint
from models.distributed import ALONE, Processes
from models.ema import EMA
from models.facts import wrong_facts
from models.infer import TileMemory, inference_dtype, restore
from models.losses import LOSSES
from models.optim import LearningRate, build_optimizer
from models.runtime import seed_all
from options.errors import OptionsError, UserError
from options.registry import MODELS
from options.schema import Options, PathOptions, TrainOptions

logger = logging.getLogger("pellucid")


class NotFinite(UserError):
    """A loss or a gradient is NaN or infinite."""


@MODELS.register()
class RestorationModel(Base):
    """Trains and judges one network.

    Args:
        options: the run.
        device: where the network lives.
        training: build losses, optimizer and moving average too.

    Raises:
        OptionsError: the network cannot be built as the options say, its scale differs from the run's, the pretrained
            weights do not fit, or the device does not compute in ``val.dtype``.
    """

    def __init__(self, *, options: Options, device: torch.device, training: bool = True) -> None:
        self.options = options
        self.device = device
        self.iteration = 0
        self._inference = {"dtype": inference_dtype(options.val.dtype, device), "memory": TileMemory()}
        self.network = build_network(options).to(device)
        self.ema: EMA | None = None
        self.processes = ALONE
        self._replica: DistributedDataParallel | None = None
        self._forward: nn.Module = self.network
        if training:
            self._prepare_training(options.train)
        if options.path.pretrain_network_g is not None:
            self._load_pretrained(options.path)
        elif not training:
            logger.warning("path.pretrain_network_g is not given: the network keeps the weights it is built with")

    def _prepare_training(self, train: TrainOptions) -> None:
        if train.use_channels_last:
            self.network.to(memory_format=torch.channels_last)
        if train.use_checkpointing:
            if not hasattr(self.network, "set_grad_checkpointing"):
                name = self.options.network_g.type
                raise OptionsError(f"train.use_checkpointing: {name} has no set_grad_checkpointing; set it to false")
            self.network.set_grad_checkpointing(True)
        self.losses = {label: build_loss(label, spec).to(self.device) for label, spec in train.loss_specs().items()}
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(trained, train.optim_g.spec())
        scheduler = train.scheduler.spec() if train.scheduler else None
        self.learning_rate = LearningRate(scheduler, warmup_iter=train.warmup_iter)
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.ema = EMA(self.network, decay=train.ema_decay) if train.ema_decay > 0 else None
        self.amp_dtype = getattr(torch, train.amp_dtype) if train.use_amp else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.amp_dtype is torch.float16)
        self._forward = self._compiled(self.network)

    def _compiled(self, network: nn.Module) -> nn.Module:
        wanted = self.options.train.use_compile
        return torch.compile(network, mode=wanted if isinstance(wanted, str) else None) if wanted else network

    def distribute(self, processes: Processes) -> None:
        """See :meth:`Base.distribute`: the first process's weights, each process its own random numbers."""
        if processes.world == 1:
            return
        self.processes = processes
        with processes.talking():
            self._replica = DistributedDataParallel(
                self.network,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                find_unused_parameters=self.options.find_unused_parameters,
                gradient_as_bucket_view=True,
            )
        self._forward = self._compiled(self._replica)
        if self.ema is not None:
            # what get_extra_state returns need be no tensor
            processes.take_from_main(v for v in self.ema.network.state_dict().values() if isinstance(v, Tensor))
        if processes.rank:
            # dropout and the like are to differ; the first process draws what it would draw alone
            seed_all(self.options.manual_seed + processes.rank, deterministic=self.options.deterministic)

    def _load_pretrained(self, path: PathOptions) -> None:
        file = path.pretrain_network_g
        sections = read_checkpoint(file).sections
        key = None if path.param_key_g == "auto" else path.param_key_g
        if self.ema is not None:
            # as BasicSR: training goes on from the weights, the average from the average
            average = "params_ema" if "params_ema" in sections else key
            loaded = load_weights(self.ema.network, file, key=average, strict=path.strict_load_g)
            logger.info(f"the average starts from {file}: {loaded}")
            key = "params" if key is None and "params" in sections else key
        loaded = load_weights(self.network, file, key=key, strict=path.strict_load_g)
        logger.info(f"the network starts from {file}: {loaded}")

    def train_step(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """See :meth:`Base.train_step`. Raises :class:`NotFinite` where ``train.nan_guard`` is ``stop``."""
        train = self.options.train
        step = self.iteration + 1
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = self.learning_rate(step, base)
        self.network.train()
        self.optimizer.zero_grad(set_to_none=True)
        logs: dict[str, Tensor] = {}
        for i, batch in enumerate(batches):
            with self._averaging(last=i == len(batches) - 1):
                values = self._backward(batch, 1 / len(batches))
            for label, value in values.items():
                logs[label] = logs.get(label, 0) + value / len(batches)
        self._share()
        self.scaler.unscale_(self.optimizer)
        limit = train.grad_clip if train.use_grad_clip else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), limit)
        sound = self._is_sound(logs, norm, batches, step)
        self.changing = True
        if sound:
            self.scaler.step(self.optimizer)
            if self.ema is not None:
                self.ema.update(self.network)
        self.scaler.update()
        self.iteration = step
        self.changing = False
        return {**logs, "grad_norm": norm.detach()}

    @contextlib.contextmanager
    def _averaging(self, *, last: bool) -> Iterator[None]:
        """Average gradients over the processes in the last of several batches only, with what they summed up to."""
        if self._replica is None:
            yield
            return
        with contextlib.nullcontext() if last else self._replica.no_sync(), self.processes.talking():
            try:
                yield
            except RuntimeError as error:
                if "Expected to have finished reduction" in str(error):
                    raise self._unused() from error
                raise

    def _share(self) -> None:
        if self._replica is None:
            return
        if not self.options.find_unused_parameters and any(p.grad is None for p in self._trained()):
            raise self._unused()
        # running statistics, before the average follows them; what is not saved is a table that never changes
        saved = self.network.state_dict()
        self.processes.take_from_main(saved[name] for name, _ in self.network.named_buffers() if name in saved)

    def _trained(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.network.parameters() if parameter.requires_grad)

    def _unused(self) -> OptionsError:
        names = [n for n, p in self.network.named_parameters() if p.requires_grad and p.grad is None]
        text = f"{', '.join(names[:5]) or 'of them'}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        return OptionsError(
            f"some parameters had no part in the loss, so the processes cannot average their gradients: {text}; if "
            "that is meant, set find_unused_parameters: true"
        )

    def _backward(self, batch: Batch, share: float) -> dict[str, Tensor]:
        lq, gt = self._to_device(batch["lq"]), self._to_device(batch["gt"])
        with torch.autocast(self.device.type, self.amp_dtype, enabled=self.amp_dtype is not None):
            pred = self._forward(lq)
        values = {label: loss(pred, gt) for label, loss in self.losses.items()}
        for label, value in values.items():
            if value.numel() != 1:
                raise OptionsError(f"the loss {label} returned {tuple(value.shape)}, but training needs one number")
        self.scaler.scale(sum(values.values()) * share).backward()
        return {label: value.detach() for label, value in values.items()}

    def _is_sound(self, logs: Mapping[str, Tensor], norm: Tensor, batches: Sequence[Batch], step: int) -> bool:
        # one synchronisation a step: weights that met a NaN once are lost
        guard = self.options.train.nan_guard
        if guard == "off":
            return True
        finite = torch.stack([value.float() for value in (*logs.values(), norm.detach())]).isfinite().tolist()
        # at an infinite gradient of float16 the scaler leaves out the step and lowers its scale by itself
        sound = all(finite) or (self.scaler.is_enabled() and all(finite[:-1]))
        if not self.processes.highest(not sound):
            return True
        names = ", ".join(str(name) for batch in batches for name in batch.get("name", []))
        values = ", ".join(f"{label} {value.item():.4g}" for label, value in (*logs.items(), ("gradient norm", norm)))
        everyones = self.processes.gather(None if sound else f"{values} (pictures: {names})")
        found = {rank: own for rank, own in enumerate(everyones) if own}
        where = "; ".join(f"rank {rank}: {own}" if self.processes.world > 1 else own for rank, own in found.items())
        text = f"iteration {step}: {where}"
        if guard == "skip":
            logger.warning(f"{text}; the step is left out")
            return False
        raise NotFinite(
            f"{text}; the weights are those of the step before. Lower the learning rate, set train.use_grad_clip, "
            "use bfloat16 rather than float16, or set train.nan_guard to skip"
        )

    def _to_device(self, picture: Tensor) -> Tensor:
        layout = torch.channels_last if self.options.train.use_channels_last else torch.contiguous_format
        return picture.to(self.device, non_blocking=True).contiguous(memory_format=layout)

    def predict(self, lq: Tensor) -> Tensor:
        """See :meth:`Base.predict`; done as ``val`` says; the result lies on the device of ``lq``."""
        network, val = self.ema.network if self.ema is not None else self.network, self.options.val
        was_training = network.training
        # an average is in eval mode throughout, and keeps what it has cached
        if was_training:
            network.eval()
        try:
            choices = {"tile": val.tile, "overlap": val.overlap, "self_ensemble": val.self_ensemble}
            return restore(network, lq, **choices, **self._inference)
        finally:
            if was_training:
                network.train()

    def learning_rates(self) -> tuple[float, ...]:
        """See :meth:`Base.learning_rates`."""
        return tuple(group["lr"] for group in self.optimizer.param_groups)

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """See :meth:`Base.weights`."""
        networks = {"params": self.network}
        if self.ema is not None:
            networks["params_ema"] = self.ema.network
        # what a module's get_extra_state returns need be no tensor
        return {
            key: {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in n.state_dict().items()}
            for key, n in networks.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Base.state_dict`."""
        return {
            "iteration": self.iteration,
            "weights": self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_type": type(self.optimizer).__name__,
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Base.load_state_dict`."""
        own = type(self.optimizer).__name__
        if state.get("optimizer_type") != own:
            text = f"the saved state is of the optimizer {state.get('optimizer_type')}, this run's is {own}"
            raise OptionsError(f"{text}; to change it, start anew from the weights with path.pretrain_network_g")
        try:
            if "network_g" not in (self.options.path.ignore_resume_networks or ()):
                weights = state["weights"]
                _check_shapes(self.network, weights["params"])
                self.network.load_state_dict(weights["params"])
                if self.ema is not None:
                    self.ema.network.load_state_dict(weights.get("params_ema", weights["params"]))
            self._load_optimizer(state["optimizer"])
            # a state without mixed precision has nothing to say about the scale of gradients
            if state["scaler"]:
                self.scaler.load_state_dict(state["scaler"])
            self.iteration = int(state["iteration"])
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            text = str(error).splitlines()[0]
            raise OptionsError(f"the saved state does not fit this run's network and optimizer: {text}") from error

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        # the moments come from the state, the settings (weight decay, betas ..) from the options of this run
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        for group, own in zip(state["param_groups"], settings, strict=True):
            for key in ("amsgrad", "centered", "momentum"):
                # these decide which moments there are
                if bool(group.get(key)) != bool(own.get(key)):
                    raise ValueError(f"{key} was {group.get(key)} and is {own.get(key)}")
        self.optimizer.load_state_dict(state)
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)


def _check_shapes(network: nn.Module, saved: Mapping[str, Tensor]) -> None:
    # a network may adapt weights of another scale when it loads them; to go on with a run that is wrong
    for key, tensor in network.state_dict().items():
        if key in saved and isinstance(tensor, Tensor) and saved[key].shape != tensor.shape:
            raise ValueError(f"{key} is {tuple(saved[key].shape)} in the state and {tuple(tensor.shape)} here")


def build_network(options: Options) -> nn.Module:
    """Build the run's network; see :func:`build`."""
    return build(options.network_g.spec(), scale=options.scale)


def build(spec: Mapping[str, Any], *, scale: int | None, place: str = "network_g") -> nn.Module:
    """Build a network by its type and arguments.

    Args:
        spec: ``type`` and the arguments, which :func:`options.check.component` found nothing against.
        scale: by how much it is to enlarge, or None where only the network can say.
        place: where the spec comes from, for messages.

    Raises:
        OptionsError: the constructor refuses its arguments, the network's scale is another, it states something about
            itself that cannot be meant, or the environment asks for a kernel that there is not.
    """
    try:
        dispatch.check_environment()
    except ValueError as error:
        raise OptionsError(str(error)) from error
    try:
        network = ARCHS.build(spec)
    except (ValueError, TypeError, RuntimeError, MemoryError, OverflowError) as error:
        raise OptionsError(f"{place}: {str(error) or 'out of memory'}") from error
    if not hasattr(network, "scale"):
        source = "1 is assumed" if scale is None else f"{scale} is assumed, as stated beside it"
        logger.warning(f"{spec['type']} does not state its scale: {source}")
        network.scale = scale or 1
    wrong = wrong_facts(network)
    if wrong:
        raise OptionsError(f"{place}: " + "; ".join(wrong))
    if scale not in (None, network.scale):
        raise OptionsError(f"scale is {scale}, but the network {spec['type']} enlarges by {network.scale}")
    return network


def build_loss(label: str, spec: dict[str, Any]) -> nn.Module:
    """Build a loss that yields one number.

    Raises:
        OptionsError: the constructor refuses its arguments, or the loss would yield a map.
    """
    if spec.get("reduction") == "none":
        raise OptionsError(f"the loss {label} has reduction none, but training needs one number: take mean or sum")
    try:
        return LOSSES.build(spec)
    except (ValueError, TypeError) as error:
        raise OptionsError(f"the loss {label}: {error}") from error
