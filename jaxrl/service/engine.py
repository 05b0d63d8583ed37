"""The engine: one thread owns the devices and does accepted requests, in order."""

import functools
import json
import logging
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tinker import types

from jaxrl.service import answers
from jaxrl.service.checkpoints import Checkpoints
from jaxrl.service.computing import compute, find_graph, prepare_again
from jaxrl.service.devices import Devices
from jaxrl.service.drawing import Drawing
from jaxrl.service.files import Files
from jaxrl.service.history import History
from jaxrl.service.pool import Kind
from jaxrl.service.queue import Queue
from jaxrl.service.requests import TRAINING, Limits, Work, decode
from jaxrl.service.sampling import BASE, Answer, Request
from jaxrl.service.servers import NO_HEAD
from jaxrl.service.snapshots import Snapshots
from jaxrl.service.state import Store
from jaxrl.service.wire import RefusedError

_log = logging.getLogger(__name__)
_KEPT_SECONDS = 86400.0  # answers, after which a client cannot fetch them again
_TIDY_SECONDS = 600.0  # between two looks for answers and checkpoints whose time is over


class Engine:
    """Does the work of a service, and keeps what a restart needs.

    A model in a slot is its snapshot with the requests since. Without a slot, or after a restart,
    those are computed again; a request's first answer stays.
    """

    def __init__(
        self,
        devices: Devices,
        *,
        store: Store,
        files: Files,
        max_batch: int,
        slots: int,
        snapshot_seconds: float,
    ) -> None:
        """Makes an engine and queues what an earlier one had accepted.

        Args:
          devices: the model and its samplers, without tenants.
          store: sessions, models, requests and checkpoints.
          files: snapshots and checkpoints.
          max_batch: samples drawn at once.
          slots: the most tenants with adapters on the devices; one with all parameters.
          snapshot_seconds: a model is written to disk after the first optimizer step that is this
            much later than the last time.
        """
        self.base, self.store, self.files = devices.base, store, files
        self._devices = devices
        self.checkpoints = Checkpoints(store, files, devices)
        config, find = self.base.model.config, functools.partial(find_graph, store)
        self.limits = Limits(config.vocab_size, config.max_positions, find)
        self._most, self._slots = max_batch, slots
        self._snapshots = Snapshots(store, files, seconds=snapshot_seconds)
        self._kinds = dict[str, Kind]()
        self._used = dict[str, int]()  # order of use
        self._done = dict[str, int]()  # the last request that a model in a slot includes
        self.queue, self.history = Queue(kind_of=self._together, models=slots), History()
        self._lock, self._listeners = threading.Lock(), dict[str, list[Callable[[], Any]]]()
        self._waiting = dict[str, Future[Answer]]()  # for samples that are not written down
        self._drawing = Drawing(
            devices.samplers,
            self.checkpoints,
            present=self._present,
            answer=self._answer,
            fail=self.fail,
        )
        self._tidied = -math.inf
        self.fault: Exception | None = None  # for which the thread has ended the server
        self._recover()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after what it is doing, and writes all models to disk. Samples that are
        being drawn are drawn again at the next start."""
        self.queue.close()
        self._thread.join()
        for name, kind in self._devices.tenants():
            self._snapshot(name, kind)
        self._snapshots.close()

    def kind(self, model: str) -> Kind:
        """Returns what a model trains."""
        if model not in self._kinds:
            content = json.loads(self.store.model(model)["content"])
            self._kinds[model] = Kind.of(content)
        return self._kinds[model]

    def served(self, kind: Kind) -> Kind:
        """Returns what the sampler can apply: vLLM servers take no adapter of the output layer.

        Raises:
          RefusedError: if nothing else is trained.
        """
        if not (kind.rank and kind.unembed and self._devices.samplers.remote):
            return kind
        if not (kind.attention or kind.mlp):
            raise RefusedError(f"train_unembed alone: {NO_HEAD}")
        return kind._replace(unembed=False)

    def _together(self, model: str) -> Any:
        """Returns what models in one batch share; all parameters have a batch of their own."""
        kind = self.kind(model)
        return kind if kind.rank else model

    def open_line(self, model: str) -> None:
        """Prepares the queue for a model's requests."""
        if self.queue.known(model):
            return
        prepare_again(self.store, model, self.limits)
        query = "SELECT seq FROM requests WHERE target = ? AND status != 'queued'"
        rows = self.store.all(query, model)
        self.queue.open(model, passed={row["seq"] for row in rows})

    def listen(self, request: str, call: Callable[[], Any]) -> None:
        """Calls `call` once the request is finished, in the engine's thread."""
        with self._lock:
            self._listeners.setdefault(request, []).append(call)

    def forget(self, request: str, call: Callable[[], Any]) -> None:
        """Takes back `listen`."""
        with self._lock:
            calls = self._listeners.pop(request, [])
            if left := [one for one in calls if one is not call]:
                self._listeners[request] = left

    def finish(
        self, request: str, answer: bytes, *, form: str = "json", failed: bool = False
    ) -> None:
        """Writes the answer to a request and tells those who wait."""
        self.store.finish(request, answer, form=form, status="failed" if failed else "done")
        with self._lock:
            calls = self._listeners.pop(request, [])
        for call in calls:
            call()

    def draw(self, request: Request) -> Future[Answer]:
        """Queues a request for samples that is not written down: it ends with the server."""
        name, waiting = f"draw-{uuid.uuid4().hex}", Future[Answer]()
        self._waiting[name] = waiting
        self.queue.add(Work(name, "sample", request.weights, 0, request))
        return waiting

    def fail(self, work: Work, error: Exception) -> None:
        """Finishes a request with an error."""
        if waiting := self._waiting.pop(work.id, None):
            return waiting.set_exception(error)
        user = isinstance(error, RefusedError)
        if not user:
            _log.exception("%s failed", work.id, exc_info=error)
        self.finish(work.id, answers.failure(error, user=user), failed=True)

    def _recover(self) -> None:
        """Queues requests that were accepted and not finished before a restart."""
        works = list[Work]()
        for row in self.store.all("SELECT * FROM requests WHERE status = 'queued' ORDER BY seq"):
            try:
                payload = decode(row["kind"], row["body"], self.limits)
                if row["kind"] == "sample":
                    payload = self.with_weights(payload, self.weights_of(row["target"]))
            except ValueError as error:  # the model has changed
                self.finish(row["id"], answers.failure(error, user=True), failed=True)
                continue
            works.append(Work(row["id"], row["kind"], row["target"], row["seq"], payload))
        for work in works:  # after the failures, which the lines pass over
            if work.kind in TRAINING:
                self.open_line(work.target)
            self.queue.add(work)

    def weights_of(self, sampler: str) -> str:
        """Returns the name of the weights that a sampling session was made with."""
        row = self.store.one("SELECT path FROM samplers WHERE id = ?", sampler)
        if row is None:
            raise RefusedError(f"there is no sampling session {sampler!r}; create one")
        return row["path"]

    def with_weights(self, request: Request, name: str) -> Request:
        """Names the weights of a request: a checkpoint's path, or a model, for its present ones."""
        whole, model = "", name
        if name.startswith("tinker://"):
            model = types.ParsedCheckpointTinkerPath.from_tinker_path(name).training_run_id
        if name != BASE and self._served_whole(self.kind(model)):
            whole = name
        return request._replace(weights=name, whole=whole)

    def _run(self) -> None:
        ahead, most, drawing = 0.0, self._most, self._drawing
        try:  # `ahead`: seconds that training has had more than the samples that are being drawn
            while taken := self.queue.take(
                most=most, begun=drawing.begun, train=ahead <= 0, drawn=drawing.took
            ):
                training, samples = taken
                ahead = max(0.0, ahead) if drawing.begun else 0.0
                began = time.monotonic()
                if training:
                    self._guarded(self._train, training)
                if samples:
                    self._guarded(drawing.join, samples)
                trained = time.monotonic()
                if drawing.begun:
                    self._draw_on(wait=not training)
                    if not self._devices.samplers.remote:  # servers draw meanwhile
                        ahead += 2 * trained - began - time.monotonic()
                self._tidy()
        except Exception as error:  # on a full disk not even an error can be answered
            self.fault = error
            _log.exception("the server ends")
            os.kill(os.getpid(), signal.SIGTERM)

    def _draw_on(self, *, wait: bool = True) -> None:
        """Draws samples for a moment, see `Drawing.advance`. If that fails, each request is drawn
        alone."""
        try:
            self._drawing.advance(wait=wait)
        except Exception as error:
            works = self._drawing.forget()
            if len(works) == 1:
                return self.fail(works[0], error)
            for work in works:
                self._guarded(self._drawing.alone, [work])

    def _tidy(self) -> None:
        """Deletes answers and checkpoints whose time is over, if it has not lately."""
        if time.monotonic() - self._tidied < _TIDY_SECONDS:
            return
        self.store.forget_answers(before=time.time() - _KEPT_SECONDS)
        self.checkpoints.expire()
        self._tidied = time.monotonic()

    def _guarded(self, do: Callable[[Sequence[Work]], None], works: Sequence[Work]) -> None:
        """Does requests together; if that fails, each alone, so that one costs no other."""
        try:
            do(works)
        except Exception as error:
            again = len(works) > 1
            if works[0].kind in TRAINING and not isinstance(error, RefusedError):
                # Buffers may be lost and gradients half added: all models come back from disk.
                self._devices.clear()
                self._done.clear()
                again = again or bool(self._drawing.begun)
                while self._drawing.begun:  # they may have the memory that was missing
                    self._draw_on()
            if not again:
                return self.fail(works[0], error)
            for work in works:
                # An answer that was written counts: to compute it again would apply it twice.
                if work.id in self._waiting or self.store.queued(work.id):
                    self._guarded(do, [work])

    def _answer(self, work: Work, answer: Answer) -> None:
        if waiting := self._waiting.pop(work.id, None):
            waiting.set_result(answer)
        else:
            self.finish(work.id, answers.samples(work.payload, answer), form="proto")

    def _present(self, request: Request) -> Request:
        """Names the present weights of a model, if a request asks for those; raises RefusedError
        for a checkpoint that is no longer there, whether or not the sampler has it loaded."""
        model = request.weights
        if model.startswith("tinker://"):
            self.checkpoints.find(model)
        if not self.queue.known(model):
            return request
        kind = self.kind(model)
        self._resident(model, kind, keep=set())
        name = f"{model}@{self._done[model]}"
        self._devices.keep(kind, model, name)
        return request._replace(weights=name, whole=name if self._served_whole(kind) else "")

    def _served_whole(self, kind: Kind) -> bool:
        return not kind.rank or self.base.precision.sums == "fixed"

    def _train(self, works: Sequence[Work]) -> None:
        kind = self.kind(works[0].target)
        for model in dict.fromkeys(work.target for work in works):
            self._resident(model, kind, keep={work.target for work in works})
        if works[0].kind == "compute":
            self._compute(works, kind)
        else:
            self._single(works[0], kind)
        for work in works:
            self._done[work.target] = max(work.seq, self._done.get(work.target, -1))
            self.store.update("models", work.target, used=time.time())

    def _compute(self, works: Sequence[Work], kind: Kind) -> None:
        run = functools.partial(self._devices.compute, kind)
        scored = compute(run, [(work.target, work.payload) for work in works])
        for work, one in zip(works, scored, strict=True):
            if isinstance(one, RefusedError):
                self.fail(work, one)
                continue
            metrics, batch = answers.metrics(work.payload, one), work.payload
            self.finish(work.id, answers.output(batch, one, metrics=metrics), form="proto")
            if not batch.forward_only:
                self.history.computed(work.target, batch, metrics=metrics)

    def _single(self, work: Work, kind: Kind) -> None:
        do = {
            "create": lambda work, kind: types.CreateModelResponse(model_id=work.target),
            "load": self._load,
            "step": self._step,
            "save": self._save,
            "external": self._save,
            "publish": self._publish,
        }
        found: Any = do[work.kind](work, kind)
        self.finish(work.id, answers.encode(found))
        if work.kind == "step":
            self.history.stepped(work.target, found.metrics)
        if work.kind == "load" or (work.kind == "step" and self._snapshots.due(work.target)):
            self._done[work.target] = work.seq
            self._snapshot(work.target, kind)
        if work.kind == "load":  # before its checkpoint can be deleted
            self._snapshots.settle(work.target)

    def _step(self, work: Work, kind: Kind) -> Any:
        found = self._devices.step(kind, work.target, work.payload)
        return types.OptimStepResponse(metrics=found)

    def _load(self, work: Work, kind: Kind) -> Any:
        request: types.LoadWeightsRequest = work.payload
        saved = self.checkpoints.saved(request.path)
        self._devices.load(kind, work.target, saved, optimizer=request.optimizer)
        return types.LoadWeightsResponse(
            path=request.path, model_id=work.target, type="load_weights"
        )

    def _save(self, work: Work, kind: Kind) -> Any:
        path = self.checkpoints.save(work, kind)
        if work.kind == "external":
            return answers.Exported(path=path, type="save_weights_external")
        return types.SaveWeightsResponse(path=path, type="save_weights")

    def _publish(self, work: Work, kind: Kind) -> Any:
        return self.checkpoints.publish(work, kind)

    def _resident(self, model: str, kind: Kind, *, keep: set[str]) -> None:
        """Brings a model to a slot, and writes others to disk if there are too many."""
        self._used[model] = max(self._used.values(), default=0) + 1
        held = self._devices.tenants()
        if (model, kind) in held:
            return
        several = [one for one in held if bool(one[1].rank) == bool(kind.rank)]
        most = self._slots if kind.rank else 1
        others = sorted((x for x in several if x[0] not in keep), key=lambda x: self._used[x[0]])
        for name, of in others[: max(0, len(several) + 1 - most)]:
            self._snapshot(name, of)
            self._devices.remove(of, name)
        seed = json.loads(self.store.model(model)["content"])["seed"]
        seq = self._devices.add(kind, model, seed=seed, snapshot=self._snapshots.last(model))
        try:
            self._replay(model, kind, after=seq)
        except BaseException:  # half of the requests are no state to go on from
            self._devices.remove(kind, model)
            raise

    def _replay(self, model: str, kind: Kind, *, after: int) -> None:
        """Computes finished requests again that a snapshot does not include."""
        self._done[model] = after
        rows = self.store.all(
            "SELECT * FROM requests WHERE target = ? AND seq > ? AND status = 'done' ORDER BY seq",
            model,
            after,
        )
        for row in rows:
            if row["kind"] in ("compute", "step", "load"):
                payload = decode(row["kind"], row["body"], self.limits)
                work = Work(row["id"], row["kind"], model, row["seq"], payload)
                if row["kind"] == "compute":
                    if not payload.forward_only:
                        compute(functools.partial(self._devices.compute, kind), [(model, payload)])
                elif row["kind"] == "step":
                    self._step(work, kind)
                else:
                    self._load(work, kind)
            self._done[model] = row["seq"]

    def _snapshot(self, model: str, kind: Kind) -> None:
        self._snapshots.write(model, self._devices.read(kind, model), seq=self._done[model])
