"""The engine: requests in, tokens out, one step after another. The loop is `Engine.step`."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import jax

from polyjax.compiler.worker import CompilerProcess
from polyjax.core.errors import RequestError
from polyjax.engine import build
from polyjax.engine.admin import run_command
from polyjax.engine.batch import BatchPacker
from polyjax.engine.checkpoint import CheckpointReader
from polyjax.engine.compile_watch import CompileWatch
from polyjax.engine.constraints import Constraints
from polyjax.engine.events import AuditLog, EventLog
from polyjax.engine.install import Installer
from polyjax.engine.kernels import KernelIntake
from polyjax.engine.last_good import LastGoodPlan, first_programs
from polyjax.engine.launcher import Launcher, RunningStep
from polyjax.engine.lease import Lease, TuningLeases
from polyjax.engine.pages import PageAllocator
from polyjax.engine.phases import PhaseClock
from polyjax.engine.plan_changes import PlanChanges
from polyjax.engine.probation import Probation
from polyjax.engine.programs import ProgramTable
from polyjax.engine.promotion import Policy
from polyjax.engine.scheduler import Scheduler
from polyjax.engine.shapes import LaunchShapes
from polyjax.engine.sleep import Sleeper
from polyjax.engine.state import DeviceState
from polyjax.engine.step import ScheduledStep
from polyjax.engine.types import (
    EngineConfig,
    EngineInfo,
    EngineStats,
    Request,
    RequestOutput,
)
from polyjax.engine.warm import warm
from polyjax.engine.weights import WeightsLoader
from polyjax.io.digest import ParamsDigest
from polyjax.io.files import Progress, no_progress, open_model

IDLE_WAIT_S = 0.02  # how long a step without rows waits for the compiler process

log = logging.getLogger("polyjax.engine")


class Engine:
    """Satisfies `EngineLike`. One thread calls it.

    Raises ConfigError or ModelError where the config cannot be served.
    """

    def __init__(self, config: EngineConfig, progress: Progress = no_progress):
        started_s = time.monotonic()
        self.config = config
        mesh_plan = build.mesh_plan_of(config)
        self.mesh = mesh_plan.mesh()
        device = self.mesh.devices.flat[0]
        files = open_model(config.model, progress)
        model = build.open_served_model(config, files, device.platform)
        self.constraints = Constraints(lambda: build.grammar_compiler(config, model))
        digest = ParamsDigest()
        params = build.load_weights(config, model, self.mesh, mesh_plan, progress, digest)
        jax.block_until_ready(params)
        loaded_s = time.monotonic()

        sizing = build.size_engine(config, model, mesh_plan, device)
        self.spec = sizing.spec
        self.state = DeviceState(sizing.spec, mesh_plan, self.mesh, params)
        self.source = build.ProgramSource(sizing.spec, self.mesh, build.open_cache(config))
        compiler = CompilerProcess(self.source.cache)
        if device.platform != "cpu":
            compiler.start()  # now: its device context would cost running streams a step
        last_good = None
        if config.state_dir is not None:
            last_good = LastGoodPlan(config.state_dir, model.files.name, device.device_kind)
        first = first_programs(
            *(config, sizing, mesh_plan, device), self.source, compiler, last_good, progress
        )
        self.programs = ProgramTable(first, config.resident_plans)
        self.step_number = 0
        audit = AuditLog(config.audit_log) if config.audit_log is not None else None
        self.events = EventLog(lambda: (self.step_number, self.programs.epoch), audit)
        calls = build.platform_defaults(device.platform).warm_calls
        for program in first.programs.values():
            warm(program, self.state, calls)
        trials = CompilerProcess(
            self.source.cache, module="polyjax.gates.first_run", name="first-run"
        )
        self.installer = Installer(
            *(self.source, self.state, self.programs, compiler, calls, trials, self.events.add),
            Policy(watch_steps=config.watch_steps),
        )
        self.kernels = KernelIntake(self.source, self.programs, self.installer, self.events.add)
        self.scheduler = self._make_scheduler(sizing, model)
        self.probation = Probation(
            self.programs, self.events.add, last_good, self.installer.policy.watch_steps
        )
        self.changes = PlanChanges(
            self.programs, self.installer, self.probation, self.scheduler, self.events
        )
        self.leases = TuningLeases(config.tune_duty, self._record_lease)
        self.shapes = LaunchShapes()
        self.constraints.wait_until_made()
        self.phases = PhaseClock()
        max_pages = -(-sizing.limits.max_model_len // sizing.spec.page_size)
        packer = BatchPacker(sizing.spec.num_slots, len(model.config.kv_groups()), max_pages)
        self.launcher = Launcher(self.state, packer, self.mesh, self.phases)
        reader = CheckpointReader(config, model, sizing.spec, mesh_plan, self.mesh)
        self.weights = WeightsLoader(reader, reader.first(digest))
        self.sleeper = Sleeper(self.weights)
        ready_s = time.monotonic()
        self.info = self._make_info(model, sizing, loaded_s - started_s, ready_s - loaded_s)
        self.in_flight: RunningStep | None = None
        self._last_read_s: float | None = None  # when the step before was read, if one ran on
        self._outputs: list[RequestOutput] = []
        self._last_step_s = ready_s
        self._iteration_tokens = 0
        self.watch = CompileWatch()

    # -- the loop ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        if not self.sleeper.is_awake:
            return self.sleeper.has_work or bool(self._outputs)
        if self.weights.has_work or self._outputs:
            return True
        changing = self.changes.wants_step or self.kernels.wants_step
        return self.scheduler.has_work or changing

    def step(self) -> list[RequestOutput]:
        """Launches the next step and commits the one before it while this one runs."""
        self.phases.start_step()
        self._outputs += self.changes.apply(self.step_number)
        self.weights.advance(self)
        self.sleeper.advance(self)
        if not self.sleeper.is_awake:
            self.step_number += 1
            return self._take_outputs()
        for sequence, refusal in self.constraints.collect():
            self._outputs.append(self.scheduler.refuse(sequence, refusal))
        batch = self.scheduler.next_batch()
        self.leases.observe(self.scheduler.num_running, self.scheduler.num_waiting)
        self.phases.mark("schedule")
        running = self._launch(batch) if batch else None
        committed = self._commit(self.in_flight)
        self.in_flight = self._sample(running) if running and committed else None
        if batch is None and not self._outputs:
            self.constraints.wait(IDLE_WAIT_S)
        return self._end_step(batch)

    def _launch(self, batch: ScheduledStep) -> RunningStep | None:
        """Dispatches a step. If that fails, the step before it still counts."""
        epoch = self.programs.epoch
        try:
            self.installer.before_launch(batch)
            running = self.launcher.launch(batch, self.programs.current, epoch)
            self.probation.launched(running)
            self.shapes.add(batch, self.spec.page_size)
            return running
        except Exception as error:
            log.exception("step %d could not be launched", self.step_number)
            earlier, self.in_flight = self.in_flight, None
            if self._commit(earlier):
                self._recover(batch, error, not self.probation.accuse(epoch, error))
            return None

    def _sample(self, running: RunningStep) -> RunningStep | None:
        """Dispatches the samplers that waited for the step before to be committed."""
        try:
            self.launcher.sample(running)
        except Exception as error:
            log.exception("step %d could not be sampled", self.step_number)
            self._recover(running.step, error, not self.probation.accuse(running.epoch, error))
            return None
        return running

    def _commit(self, running: RunningStep | None) -> bool:
        """Takes in what a step made; False if it failed, which voids the steps after it, too."""
        if running is None:
            self._last_read_s = None
            return True
        try:
            results = self.launcher.read(running)
            self.probation.check(running)
        except Exception as error:
            log.exception("a step failed on the device")
            self._recover(running.step, error, not self.probation.accuse(running.epoch, error))
            return False
        self.probation.committed(running, self._step_us())
        self._outputs += self.scheduler.commit(running.step, results, running.epoch)
        self.phases.mark("commit")
        return True

    def _step_us(self) -> float | None:
        """Microseconds since the step before was read; None where other work lay between."""
        before_s, self._last_read_s = self._last_read_s, time.perf_counter()
        if before_s is None or self.installer.is_disturbing:
            return None
        return (self._last_read_s - before_s) * 1e6

    def _recover(
        self, batch: ScheduledStep, error: Exception, blames_sequences: bool = True
    ) -> None:
        """Starts over with empty pools: requests keep their tokens and are computed again."""
        reason = f"the step failed: {error}"
        self._outputs += self.scheduler.fail_step(batch, reason, blames_sequences)
        self.state.rebuild()
        self.launcher.forget_slots()
        self._last_read_s = None

    def _advance_changes(self) -> None:
        """A candidate that fails while it is tried takes along the state it was given."""
        if not self.sleeper.is_awake:
            return
        try:
            wait_s = 0.0 if self.scheduler.has_work else IDLE_WAIT_S
            self.installer.after_launch(self.in_flight)
            self.installer.advance(self.step_number, wait_s)
            self.changes.start_proposal()
            self.kernels.advance(wait_s)
        except Exception as error:
            log.exception("a candidate program failed")
            running, self.in_flight = self.in_flight, None
            if running is not None:
                self._recover(running.step, error, blames_sequences=False)
            else:
                self.scheduler.allocator.forget_all()
                self.state.rebuild()
                self.launcher.forget_slots()

    def _end_step(self, batch: ScheduledStep | None) -> list[RequestOutput]:
        self.phases.end_step()
        self._advance_changes()
        self.step_number += 1
        self._last_step_s = time.monotonic()
        self._iteration_tokens = batch.num_tokens if batch else 0
        if self.config.fail_on_recompile and (self.watch.compiles or self.watch.traces):
            raise RuntimeError(
                f"{self.watch.compiles} compiles and {self.watch.traces} traces after warm-up "
                "(--fail_on_recompile)"
            )
        return self._take_outputs()

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- what lives on the devices, between two steps ----------------------------------------

    def pause(self) -> None:
        """Takes in the step in flight and lets every request wait: no page is needed any more."""
        running, self.in_flight = self.in_flight, None
        self._commit(running)
        self.scheduler.requeue_all()

    def release_pools(self) -> None:
        """Frees all but the weights, after `pause`."""
        self.state.release_pools()
        self.launcher.forget_slots()

    def drop_started(self, reason: str) -> None:
        """Ends what had begun, after `pause`; the next step tells those who wait for it."""
        self._outputs += self.scheduler.drop_started(reason, status=503)

    # -- requests ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self._check_token_ids(request)
        if request.params.grammar is None:
            self.scheduler.add(request)
            return
        self.constraints.check_available()
        self.constraints.begin(self.scheduler.add(request))

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def close(self) -> None:
        """Ends the compiler process and waits for what the device still computes."""
        self.kernels.close()
        self.installer.close()
        self.probation.close()
        self.events.close()
        self.weights.close()
        self.sleeper.close()
        self.constraints.close()
        self.in_flight = None
        with contextlib.suppress(RuntimeError):  # pools that a failed step took along
            jax.block_until_ready(self.state.kv)

    def _check_token_ids(self, request: Request) -> None:
        vocab = self.spec.config.vocab_size
        params = request.params
        if any(not 0 <= token < vocab for token in request.prompt_token_ids):
            raise RequestError(f"a prompt token id is outside the vocabulary of {vocab}", "prompt")
        for token, _ in params.logit_bias:
            if not 0 <= token < vocab:
                raise RequestError(
                    f"logit_bias names token {token}; the vocabulary has {vocab}", "logit_bias"
                )
        if params.numerics not in (None, self.changes.numerics):
            raise RequestError(
                f"numerics {params.numerics!r} is not what the plan in force guarantees: "
                f"{self.changes.numerics!r}",
                "numerics",
            )

    # -- what it tells -----------------------------------------------------------------------

    def admin(self, command: str, payload: dict[str, Any]) -> dict[str, Any]:
        return run_command(self, command, payload)

    def _record_lease(self, lease: Lease, used_s: float) -> None:
        facts = {"agent": lease.agent, "used_ms": round(used_s * 1000, 3), "reason": lease.reason}
        self.events.add("lease_ended", lease_id=lease.id, **facts)

    def stats(self) -> EngineStats:
        counters = self.scheduler.counters
        return EngineStats(
            step=self.step_number,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            kv_usage=self.scheduler.allocator.usage,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.preemptions,
            prefix_queries_tokens=counters.prefix_queries_tokens,
            prefix_hits_tokens=counters.prefix_hits_tokens,
            epoch=self.programs.epoch,
            plan_digest=self.programs.current.plan.digest,
            swaps=self.programs.swaps,
            rollbacks=self.programs.rollbacks,
            compiles_after_ready=self.watch.compiles,
            retraces_after_ready=self.watch.traces,
            last_step_monotonic_s=self._last_step_s,
            iteration_tokens=self._iteration_tokens,
            weights_path=self.weights.current.path,
            weights_digest=self.weights.current.digest,
            sleep_level=self.sleeper.level,
            tune=self.leases.to_json(),
            phase_us=dict(self.phases.average_us),
            phase_s=dict(self.phases.total_s),
        )

    def _make_scheduler(self, sizing: build.Sizing, model: build.OpenedModel) -> Scheduler:
        spec = sizing.spec
        allocator = PageAllocator(
            model.config.kv_groups(),
            spec.page_size,
            spec.num_pages,
            spec.scratch_pages,
            self.config.enable_prefix_caching,
        )
        ladder = self.programs.current.ladder
        return Scheduler(sizing.limits, ladder, allocator, spec.num_slots, model.eos_token_ids)

    def _make_info(
        self, model: build.OpenedModel, sizing: build.Sizing, load_s: float, compile_s: float
    ) -> EngineInfo:
        spec, devices = sizing.spec, list(self.mesh.devices.flat)
        kind = devices[0].device_kind
        return EngineInfo(
            model_name=self.config.served_model_name or model.files.name,
            model_path=str(model.files.path),
            device=kind if len(devices) == 1 else f"{len(devices)} x {kind}",
            dtype=model.dtype,
            max_model_len=sizing.limits.max_model_len,
            max_num_seqs=sizing.limits.max_num_seqs,
            vocab_size=spec.config.vocab_size,
            eos_token_ids=model.eos_token_ids,
            block_size=spec.page_size,
            num_kv_pages=min(sizing.usable_pages),
            kv_capacity_tokens=min(sizing.usable_pages) * spec.page_size,
            num_programs=len(self.programs.current.programs),
            plan_digest=self.programs.current.plan.digest,
            epoch=self.programs.epoch,
            load_s=load_s,
            compile_s=compile_s,
            numerics=self.programs.current.plan.numerics,
        )
