"""The command line as a user sees it: help, errors, statuses, and lazy imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.support.slowness import deadline
from weft import __version__
from weft.cli import main as cli
from weft.cli import options
from weft.common.errors import ConfigError, EngineDead, WeftError
from weft.config.flags import SETTINGS
from weft.config.sections.all import Config

COMMANDS = ["serve", "up", "chat", "generate", "eval", "verify", "models", "sim"]


def run(*arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=deadline(120),
        cwd=cwd,
    )


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command line that must fail with status 2 and a single line. Return the line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err.startswith("weft: ")
    assert err.count("\n") == 1
    return err[6:-1]


def test_no_torch_before_it_is_needed() -> None:
    """A single process runs all commands in order and names the first with a wrong import."""
    commands = [
        ["--help"],
        ["--version"],
        ["models"],
        *[[c, "--help"] for c in COMMANDS],
        ["eval", "gsm-mini", "--help"],
        ["eval", "tools-mini", "--help"],
        ["eval", "ocr-mini", "--help"],
    ]
    code = (
        f"import sys\nfrom weft.cli.main import main\nfor arguments in {commands!r}:\n"
        "    try:\n        main(arguments)\n    except SystemExit as end:\n"
        "        assert end.code == 0, (arguments, end.code)\n"
        "    loaded = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not loaded, (arguments, loaded)\n"
        "    print(flush=True)\n    print('ran', arguments, flush=True)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=deadline(120))
    assert made.returncode == 0, made.stderr
    shown = made.stdout
    for arguments in commands:
        before, _, shown = shown.partition(f"\nran {arguments}\n")
        assert before.strip(), f"{arguments} shows nothing"
    assert not shown.strip()


def test_the_front_process_of_serve_imports_no_torch() -> None:
    code = "import sys, weft.cli.serve.serve, weft.config.resolve, weft.front.front_server\n"
    code += "assert 'torch' not in sys.modules"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=deadline(120))
    assert made.returncode == 0, made.stderr


def test_version() -> None:
    assert run("--version").stdout == f"weft, version {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "generate", "verify"])
def test_help_lists_every_flag_with_its_default(command: str) -> None:
    text = " ".join(run(command, "--help").stdout.split())
    for setting in SETTINGS.values():
        if setting.section in options.ENGINE or command == "serve":
            assert setting.flag in text, setting.flag
    assert "[0..1048576; default: 0]" in text


@pytest.mark.parametrize(
    ("arguments", "sections"),
    [
        (["serve"], options.ALL),
        (["generate"], options.ENGINE),
        (["verify"], options.ENGINE),
        (["eval", "gsm-mini"], options.ENGINE),
        (["eval", "tools-mini"], options.ENGINE),
        (["eval", "ocr-mini"], options.ENGINE),
        (["bench", "offline"], options.ENGINE),
        (["bench", "sweep"], options.ENGINE),
        (["sim"], ("scheduler", "speculation")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_groups_flags_by_section(
    arguments: list[str], sections: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each heading has exactly the flags of the section; the command's own flags come first."""
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--help"])
    heading, found = "", {"": set[str]()}
    for line in capsys.readouterr().out.splitlines():
        if line and not line.startswith(" ") and line.endswith(":"):
            heading = line[:-1]
        elif line.startswith("  -"):
            found.setdefault(heading, set()).update(re.findall(r"(?<!no)--[a-z0-9-]+", line.split("   ")[0]))
    names = [heading for heading in found if heading]
    assert names[0] == "Options"
    assert {"--help", "--config"} <= found["Options"]
    assert [name.partition(" ")[0] for name in names[1:]] == [
        "Server" if section == "front" else section.capitalize() for section in sections
    ]
    assert "Scheduler (admission and the composition of steps)" in names
    for section, name in zip(sections, names[1:], strict=True):
        flags = {setting.flag for setting in SETTINGS.values() if setting.section == section}
        assert flags <= found[name]
        assert not flags & found["Options"]


def test_models_lists_bundled_ones_and_architectures() -> None:
    text = run("models").stdout
    assert "spool-text" in text
    assert "spool-mla" in text
    assert "Qwen3MoeForCausalLM" in text


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda s: s.name)
def test_a_misspelt_flag_suggests_the_nearest(setting: object, capsys: pytest.CaptureFixture[str]) -> None:
    flag = setting.flag  # type: ignore[attr-defined]
    said = failed(capsys, "serve", flag[:-1] + "q", "1")
    # --hostq is as near to --host as to --hosts
    near = {flag, flag[:-1]} & {one.flag for one in SETTINGS.values()}
    assert "one of" in said or any(f"Did you mean {name}?" in said for name in near)


def test_unknown_commands_suggest_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean" not in failed(capsys, "serve", "--tool-server", "x"), "no misspelling"
    assert "no pipeline parallelism" in failed(capsys, "serve", "--pipeline_parallel_size", "2")
    assert failed(capsys, "serv") == "no such command 'serv'. Did you mean serve?"
    assert "no such command" in failed(capsys, "zzz").lower()


@pytest.mark.parametrize("arguments", [[], ["eval"]], ids=["weft", "weft eval"])
def test_no_command_shows_the_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert "".join(capsys.readouterr()).startswith("Usage: weft")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs must be an integer of at least 1"),
        (["serve", "--dtype", "int4"], "--dtype must be one of auto"),
        (["serve", "--max-num-batched-tokens", "10"], "--max-num-seqs"),
        (["serve", "no-such-model"], "no bundled model of that name"),
        (["serve", "a", "--model", "b"], "MODEL 'a' and --model 'b' differ"),
        (["serve", "--config", "/no/such.yaml"], "--config /no/such.yaml"),
        (["serve", str(Path(__file__).parent)], "neither a config.json"),
        (["serve", "--api-key", ""], "--api-key must be text, and the given value is empty"),
        (["serve", "--served-model-name", " "], "must be text, and the given value is empty"),
        (["verify"], "--reference PATH, --self"),
        (["generate", "--top-p", "2", "hello"], "top_p must be"),
        (["eval", "gsm-mini", "--url", "ftp://x"], "--url must start with http"),
        (["eval", "gsm-mini", "--url", "http://x", "--reference"], "give only one of them"),
        (["eval", "gsm-mini", "--api-key", "k"], "--api-key requires --url"),
        (["eval", "gsm-mini", "--json", "/no/such/folder/x"], "--json must name a file"),
        (["eval", "gsm-mini", "--limit", "0"], "--limit"),
        (["eval", "gsm-mini", "--url", "http://127.0.0.1:9", "--limit", "1"], "no answer from the server"),
        (["eval", "tools-mini", "--url", "http://127.0.0.1:9", "--limit", "1"], "no answer from the server"),
        (["eval", "tools-mini", "--url", "http://x", "--reference"], "give only one of them"),
        (["eval", "ocr-mini", "--url", "http://127.0.0.1:9", "--limit", "1"], "no answer from the server"),
        (["eval", "gsm-minx"], "gsm-mini"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_one_line_and_status_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in failed(capsys, *arguments)


@pytest.mark.parametrize(("error", "status"), [(EngineDead("it died"), 1), (ConfigError("it died"), 2)])
def test_a_failure_while_running_is_no_client_error(
    error: WeftError, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == status
    assert capsys.readouterr().err == "weft: it died\n"


def test_an_error_in_a_real_process_has_no_traceback() -> None:
    made = run("serve", "--max-num-seqs", "0")
    assert made.returncode == 2
    assert made.stderr.count("\n") == 1
    assert "Traceback" not in made.stderr


def parsed(*arguments: str) -> object:
    """The configuration of a command line."""
    found = []

    @click.command()
    @click.argument("model_name", required=False)
    @options.settings(options.ALL)
    def command(model_name: str | None, **given: object) -> None:
        found.append(options.build(given, model_name))

    command.main(list(arguments), standalone_mode=False)
    return found[0]


def test_flags_reach_the_configuration_and_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("max-num-seqs: 3\nblock-size: 16\nenable-prefix-caching: false\nserved-model-name: [x]\n")
    config = parsed(
        "m", "--config", str(file), "--max-num-seqs", "5", "--served-model-name", "a,b", "--port", "0"
    )
    expected = options.from_values(
        {
            "model": "m",
            "max_num_seqs": 5,
            "block_size": 16,
            "enable_prefix_caching": False,
            "served_model_name": ("a", "b"),
            "port": 0,
        }
    )
    assert config == expected


def test_booleans_have_two_flags() -> None:
    assert parsed("--no-enable-prefix-caching") == options.from_values({"enable_prefix_caching": False})
    assert parsed("--enable-prefix-caching") == options.from_values({})
    assert parsed("--trust-remote-code") == options.from_values({"trust_remote_code": True})


def test_repeated_flags_add_up() -> None:
    expected = options.from_values({"api_key": ("a", "b", "c")})
    assert parsed("--api-key", "a", "--api-key", "b c") == expected


def test_a_configuration_as_keywords_gives_it_back() -> None:
    from weft.config.flags import from_keywords

    config = parsed(
        "m", "--max-model-len", "auto", "--api-key", "a", "--no-enable-prefix-caching", "--port", "1"
    )
    assert from_keywords(options.keywords(config)) == config  # type: ignore[arg-type]
    assert options.keywords(config) == {  # type: ignore[arg-type]
        "model": "m",
        "max_model_len": "auto",
        "api_key": ("a",),
        "enable_prefix_caching": False,
        "port": 1,
    }


def test_short_flags_set_what_the_long_ones_do() -> None:
    """--tp, --dp and --ep are other names of three flags."""
    found: list[Config] = []

    @click.command()
    @options.settings(options.ENGINE)
    def command(**given: Any) -> None:
        found.append(options.build(given))

    result = CliRunner().invoke(command, ["--tp", "2", "--dp", "3", "--ep"])
    assert result.exit_code == 0, result.output
    parallel = found[0].parallel
    assert (parallel.tensor_parallel_size, parallel.data_parallel_size) == (2, 3)
    assert parallel.enable_expert_parallel


@pytest.mark.parametrize(
    "arguments",
    [
        ("up", "examples/none.yaml"),
        ("serve", "--config", "examples/none.yaml"),
        ("serve", "spool-text", "--scripted", "examples/none.yaml"),
        ("serve", "spool-text", "--scripted", "examples/none.jsonl"),
        ("verify", "--topology", "examples/none.yaml"),
        ("sim", "--cost-model", "examples/none.json"),
    ],
)
def test_the_error_of_a_missing_file_shows_the_path(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The path may be relative to another folder, so the name alone does not show the mistake."""
    assert f"{arguments[-1]}: No such file" in failed(capsys, *arguments)
