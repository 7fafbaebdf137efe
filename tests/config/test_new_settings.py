"""New settings for groups that run: which changes a restart brings, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.config.test_topology import written
from weft.common.errors import ConfigError
from weft.config.alone import renewed
from weft.config.topology import read_topology, resolve_groups

__all__ = ["written"]

GROUPS = "groups: [{role: prefill}, {role: decode, count: 2, max-num-seqs: 4}]\n"


def test_the_groups_get_the_settings_of_the_file_and_keep_their_place(written: Any) -> None:
    present = resolve_groups(read_topology(written("kv-cache-memory: 64M\n" + GROUPS)))
    third = msgspec.structs.replace(present[2], group="decode7", gpus=("5",))
    text = written("kv-cache-memory: 64M\n" + GROUPS.replace("4", "3")).read_text()
    found = renewed(text, [*present, third], {"decode0", "decode7"})
    assert found.keys() == {"decode0", "decode7"}
    for old in (present[1], third):
        new = found[old.group]
        assert (old.scheduler.max_num_seqs, new.scheduler.max_num_seqs) == (4, 3)
        assert (new.base, new.host, new.gpus) == (old.base, old.host, old.gpus)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ("groups: [{role: prefill}]", "decode0"),
        (GROUPS.replace("role: prefill", "role: unified"), "prefill0"),
        ("max-model-len: 32\n" + GROUPS, "--max-model-len is .* and would be 32; a restart cannot change"),
        (GROUPS.replace("max-num-seqs: 4", "tp: 2"), "the number of ranks is 1 and would be 2"),
        (GROUPS.replace("max-num-seqs: 4", "dtype: float32"), "can never work together: --dtype"),
        ("groups: [", "topology.yaml"),
        ("colour: blue\n" + GROUPS, "unknown key 'colour'"),
    ],
)
def test_what_a_restart_cannot_change_is_refused_by_name(written: Any, groups: str, says: str) -> None:
    present = resolve_groups(read_topology(written("kv-cache-memory: 64M\n" + GROUPS)))
    text: Path = written("kv-cache-memory: 64M\n" + groups)
    with pytest.raises(ConfigError, match=says):
        renewed(text.read_text(), present, {"prefill0", "decode0", "decode1"})


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x: 2024-13-45\n", "not valid YAML: month must be in"),
        ("x: !!int x\n", "not valid YAML: invalid literal"),
        ("x: " + "[" * 2000, "not valid YAML: maximum recursion"),
        (LAUGHS, "more than 100,000 values"),
        ("x: &x [*x]\n", "more than 100,000 values"),
    ],
)
def test_a_text_on_which_the_loader_fails_is_refused(written: Any, text: str, says: str) -> None:
    present = resolve_groups(read_topology(written("kv-cache-memory: 64M\n" + GROUPS)))
    with pytest.raises(ConfigError, match=says):
        renewed(text, present, {"prefill0"})


def test_a_restart_asks_the_hub_for_nothing(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = "kv-cache-memory: 64M\n" + GROUPS
    own = written(groups).read_text()
    present = []
    for one in resolve_groups(read_topology(written(groups))):
        model = msgspec.structs.replace(one.model, model="owner/text")
        present.append(msgspec.structs.replace(one, model=model, served_names=("owner/text",)))
    monkeypatch.setattr("weft.config.hub._snapshot", lambda *_: pytest.fail("the hub was asked"))
    name = f"model: {msgspec.yaml.decode(own)['model']}\n"
    assert name in own
    new = renewed(own.replace(name, "model: owner/text\n"), present, {"prefill0"})["prefill0"]
    assert (new.model_path, new.model, new.served_names) == (
        present[0].model_path,
        present[0].model,
        ("owner/text",),
    )
    with pytest.raises(ConfigError, match="--model is owner/text and would be owner/other"):
        renewed(own.replace(name, "model: owner/other\n"), present, {"prefill0"})
