"""Run ``weft.front.front_server.serve`` over a scripted engine: ``python fake_server.py FOLDER JSON``.

The folder gets a tokenizer with one token per byte, ids 0 to 255, then ``<|im_start|>`` and ``<|im_end|>``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.support import pictures
from tests.support.text_folders import IMAGE_TEMPLATE, IMAGE_TOKENS, write_tokenizer
from weft.cli.serve.server import Operations, run_fronts
from weft.common import log
from weft.common.errors import Unavailable
from weft.config.resolved import EngineConfig, KVConfig
from weft.config.sections.all import (
    CacheSection,
    FrontSection,
    LoraSection,
    MediaSection,
    ModelSection,
    ParallelSection,
    RunnerSection,
    SchedulerSection,
)
from weft.config.spec import CacheSpec, ModelSpec, RopeSpec, VisionSpec
from weft.control.links.link import Address
from weft.control.processes.engine_owner import EngineOwner
from weft.control.processes.table import Member
from weft.engine.ranks.processes import start_process
from weft.front.front_server import bind, serve

VISION = VisionSpec(
    kind="qwen3_vl",
    hidden=2,
    layers=1,
    heads=1,
    intermediate=2,
    activation="gelu",
    output=2,
    side=2,
    media=pictures.FACTS,
)


def engine_config(folder: Path, fields: dict[str, Any]) -> EngineConfig:
    cache = CacheSpec(kind="full", layers=(0,), kv_heads=1, head_dim=2)
    spec = ModelSpec(
        family="llama",
        architecture="LlamaForCausalLM",
        vocab_size=300,
        hidden=2,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=2,
        intermediate=2,
        rope=RopeSpec(dim=2),
        caches=(cache,),
        max_position=512,
        eos_ids=tuple(fields.pop("eos_ids", ())),
    )
    if (vision := fields.pop("vision", False)) is not False:  # or a dict with fields of MediaFacts
        facts = msgspec.structs.replace(pictures.FACTS, **(vision if isinstance(vision, dict) else {}))
        spec = msgspec.structs.replace(spec, vision=msgspec.structs.replace(VISION, media=facts))
    media = {name: fields.pop(name) for name in MediaSection.__struct_fields__ if name in fields}
    lora = {name: fields.pop(name) for name in LoraSection.__struct_fields__ if name in fields}
    scheduler = {name: fields.pop(name) for name in ("max_num_seqs", "max_queued_requests") if name in fields}
    return EngineConfig(
        model_path=str(folder),
        tokenizer_path=str(folder),
        served_names=("fake", "org/alias"),
        accepted_names=("/data/models/fake",),
        spec=spec,
        dtype="float32",
        device="cpu",
        model=ModelSection(),
        cache=CacheSection(),
        scheduler=SchedulerSection(**scheduler),
        runner=RunnerSection(),
        media=msgspec.convert(media, MediaSection),
        lora=msgspec.convert(lora, LoraSection),
        parallel=ParallelSection(enable_expert_parallel=fields.pop("together", False)),
        kv=KVConfig(pools=(), block_size=64, enable_prefix_caching=True, max_model_len=512, num_slots=8),
    )


class FakeEngines:
    """Starts fake heads, as ``weft.engine.server.engine_processes.EngineProcesses`` starts heads."""

    def __init__(
        self,
        folder: str,
        count: int,
        loaded: list[str],
        together: bool,
        roles: Sequence[str] = (),
        most: int = 0,
    ) -> None:
        """``roles`` are the roles of the engines in order; engines without a role are unified. ``most``: the
        groups have names (unified0, ..), and the server has room for this number of engines."""
        names = [str(number) for number in range(count)]
        self._most = most
        if most:
            of = [roles[number] if number < len(roles) else "unified" for number in range(count)]
            names = [f"{role}{of[:number].count(role)}" for number, role in enumerate(of)]
        self._roles = dict(zip(names, roles, strict=False))
        expert_group = "all" if together else ""
        self.members = {name: self._member(name, expert_group) for name in names}
        self._folder, self._loaded = folder, loaded
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def _member(self, name: str, expert_group: str) -> Member:
        role = self._roles.get(name, "unified")
        return Member(expert_group, name, role, role) if self._most else Member(expert_group, role=role)

    def add(self, groups: Sequence[str], like: str) -> None:
        if len(self.members) + len(groups) > self._most:
            raise Unavailable(f"{len(groups)} more groups need {len(groups)} free GPUs")
        for name in groups:
            self._roles[name] = self._roles.get(like, "unified")
            self.members[name] = self._member(name, "")

    def forget(self, name: str) -> None:
        del self.members[name]

    def start(self, name: str, incarnation: int) -> Address:
        endpoint = f"ipc://{self._folder}/head-{name}-{incarnation}"
        script = str(Path(__file__).parent / "fake_engine.py")
        role = {"FAKE_ROLE": self._roles[name]} if name in self._roles else {}
        command = [sys.executable, script, endpoint, *self._loaded]
        process = subprocess.Popen(command, env={**os.environ, **role})
        self._running[name] = process
        self._started.append(process)
        return Address(endpoint, process, None, incarnation, expert_group=self.members[name].expert_group)

    def kill(self, name: str, incarnation: int) -> None:
        if (process := self._running.pop(name, None)) is not None:
            process.kill()

    def close(self) -> None:
        for engine in self._started:
            try:
                engine.wait(3)
            except subprocess.TimeoutExpired:
                engine.kill()
                engine.wait()


def watch_garbage(told: Path) -> None:
    """Let SIGUSR1 collect cyclic garbage and write the types of the collected objects to ``told``, as a JSON
    list. Only signals collect."""

    def collect(*_: object) -> None:
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        made = sorted(type(found).__name__ for found in gc.garbage)
        gc.garbage.clear()
        gc.collect()
        part = told.with_suffix(".part")
        part.write_text(json.dumps(made))
        part.rename(told)

    signal.signal(signal.SIGUSR1, collect)


def main(folder: Path, fields: dict[str, Any]) -> int:
    if (log_file := fields.pop("log_file", None)) is not None:
        os.dup2(os.open(log_file, os.O_WRONLY | os.O_CREAT), 2)
    log.configure("info")
    if (garbage := fields.pop("garbage", None)) is not None:
        watch_garbage(Path(garbage))
    for name, value in fields.pop("constants", {}).items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant), name
        setattr(importlib.import_module(module), constant, value)
    if files := fields.pop("files", None):  # the soft and the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(files))
    if fields.get("vision"):
        write_tokenizer(folder, added=IMAGE_TOKENS, template=IMAGE_TEMPLATE)
    else:
        write_tokenizer(folder)
    if (media_log := fields.pop("media_log", None)) is not None:
        os.environ["FAKE_MEDIA"] = media_log
    if (adapter_log := fields.pop("adapter_log", None)) is not None:
        os.environ["FAKE_ADAPTERS"] = adapter_log
    os.environ["FAKE_LORAS"] = str(fields.get("max_loras", 0))
    together = fields.get("together", False)
    config = engine_config(folder, fields)
    with tempfile.TemporaryDirectory(prefix="weft-") as private:
        loaded = fields.pop("loaded", [])
        roles = fields.pop("roles", [])
        count, restarts = fields.pop("engines", len(roles) or 1), fields.pop("restarts", 0)
        engines = FakeEngines(private, count, loaded, together, roles, fields.pop("most_engines", 0))
        front = msgspec.convert({"port": 0, "engine_restarts": restarts, **fields}, FrontSection)
        try:
            if front.fronts > 1:
                operations = Operations((), False, start_process)
                with bind(front.host, front.port, listens=False) as reserved:
                    return run_fronts(config, front, engines, Path(private), operations, reserved)  # type: ignore[arg-type]
            owner = EngineOwner(engines.members, engines, restarts)
            owner.start()
            return serve(config, front, owner)
        finally:
            engines.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
