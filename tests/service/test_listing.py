"""What the lists of a service say of training runs."""

import time
from types import SimpleNamespace

from jaxrl.service.listing import _training_run
from jaxrl.service.state import Store, dumps


def test_the_last_checkpoint_is_the_one_written_last_that_can_be_loaded(tmp_path) -> None:
    """Neither a clock that was set back nor a checkpoint whose time is over changes it."""
    store, now = Store(tmp_path / "state.sqlite"), time.time()
    content = dumps({"rank": 4, "user_metadata": None})
    shared = {"created": now, "owner": "o", "content": content}
    store.insert("models", id="m", session="s", used=now, **shared)
    for name, ago, expires in (("early", 0, None), ("late", 3600, now + 99), ("over", 0, now - 1)):
        times = {"created": now - ago, "expires": expires}
        path = f"tinker://m/weights/{name}"
        store.insert(
            "checkpoints",
            **{**shared, **times, "path": path, "model": "m", "kind": "training", "size": 1},
        )
    service = SimpleNamespace(engine=SimpleNamespace(store=store), name="tiny")
    run = _training_run(service, store.model("m"))  # type: ignore[arg-type]
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.checkpoint_id == "weights/late"
    store.close()
