"""`litspec chat` and conversations: formatted as by Hugging Face and LitGPT; answers are those of the target alone."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EOS, byte_level_tokenizer, tiny_config, write_checkpoint
from litgpt.prompts import Default, Llama3, PromptStyle, save_prompt_style
from transformers import PreTrainedTokenizerFast

from litspec import SpecLLM
from litspec.__main__ import main
from litspec.commands.chat import _Chat, save
from litspec.config import GenerateConfig
from litspec.conversation import Turns
from litspec.errors import InputError

CHATML = (
    "{% for message in messages %}\n"
    "    {%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nBe.<|im_end|>\\n' }}{% endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WITH_TOKENS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    + "{{ messages[0] | tojson }}"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
TALK = [
    {"role": "user", "content": "Hi <there> "},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "and?"},
]


def folder(path: Path, template: str | None = None, style: PromptStyle | None = None, **config: Any) -> Path:
    fields = {} if template is None else {"chat_template": template}
    made = write_checkpoint(path, tiny_config(**config), tokenizer_config=fields, seed=1)
    if style is not None:
        save_prompt_style(style, made)
    return made


def chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *args: Any
) -> tuple[int, str, str]:
    """Runs the command with a piped stdin: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(SystemExit) as exit_:
        main(["chat", *map(str, args)])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


@pytest.mark.parametrize("template", [CHATML, WITH_TOKENS])
@pytest.mark.parametrize("own_file", [False, True])
def test_a_template_renders_as_hugging_faces_does(tmp_path: Path, template: str, own_file: bool) -> None:
    made = folder(tmp_path / "a", None if own_file else template)
    if own_file:
        (made / "chat_template.jinja").write_text(template, encoding="utf-8")
    reference = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(), eos_token=EOS, bos_token="<|begin|>", chat_template=template
    )
    llm = SpecLLM.load(made, drafter="none")
    turns = llm.codec.turns
    assert turns.kind == "template" and turns.keeps_history
    for talk in (TALK[:1], TALK, [{"role": "system", "content": "Be brief."}, *TALK]):
        expected = reference.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert turns.render(talk) == expected
    assert turns.render(TALK, "Be brief.") == turns.render([{"role": "system", "content": "Be brief."}, *TALK])


def test_a_style_that_takes_messages_has_priority_over_a_template(tmp_path: Path) -> None:
    made = folder(tmp_path / "a", CHATML)
    turns = Turns(made, Llama3())
    assert turns.kind == "style"
    assert turns.render(TALK) == Llama3().apply(list(TALK))
    assert turns.render(TALK[:1], "Be brief.") == Llama3().apply(TALK[0]["content"], sys_prompt="Be brief.")


def test_without_either_the_text_runs_on_or_a_prompt_stands_alone(tmp_path: Path) -> None:
    made = folder(tmp_path / "a")
    plain = Turns(made, Default())
    assert plain.kind == "text" and plain.render(TALK) == "Hi <there> Hello!\nand?"
    alpaca = PromptStyle.from_name("alpaca")
    single = Turns(made, alpaca)
    assert single.kind == "single" and not single.keeps_history and "independent" in single.describe()
    assert single.render(TALK) == alpaca.apply("and?")


def test_a_saved_style_has_priority_over_the_base_models_template(tmp_path: Path) -> None:
    # LitGPT's fine-tuning saves its style and copies tokenizer_config.json, with the template that was there.
    alpaca, qwen3 = PromptStyle.from_name("alpaca"), PromptStyle.from_name("qwen3")
    trained = Turns(folder(tmp_path / "a", CHATML, alpaca), alpaca)
    assert trained.kind == "single" and trained.render(TALK) == alpaca.apply("and?")
    assert Turns(folder(tmp_path / "b", CHATML), alpaca).kind == "template"
    plain = Default()
    assert Turns(folder(tmp_path / "c", CHATML, plain), plain).kind == "text"
    # A template that formats the first prompt in the same way is used.
    same = CHATML.replace("<|im_start|>system\\nBe.<|im_end|>\\n", "")
    assert same != CHATML
    turns = Turns(folder(tmp_path / "d", same, qwen3), qwen3)
    assert turns.kind == "template" and turns.render(TALK[:1]).endswith("<|im_start|>assistant\n")
    assert turns.render([{"role": "user", "content": "a"}]) == qwen3.apply("a")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "must be a list"),
        ("hello", "must be a list"),
        ([{"role": "user"}], "role and content"),
        ([{"role": "user", "content": 5}], "must be a string, got a int"),
        ([{"role": "assistant", "content": "a"}], "got assistant"),
        (TALK[:2], "got user, assistant"),
        ([TALK[0], {"role": "system", "content": "x"}, TALK[2]], "got user, system, user"),
    ],
)
def test_messages_that_are_not_a_conversation_are_refused(tmp_path: Path, messages: Any, said: str) -> None:
    turns = Turns(folder(tmp_path / "a"), Default())
    with pytest.raises(InputError, match=said):
        turns.render(messages)


def test_a_template_that_refuses_or_is_broken_is_a_sentence(tmp_path: Path) -> None:
    turns = Turns(folder(tmp_path / "a", REFUSES), Default())
    assert turns.render(TALK) == "ok"
    with pytest.raises(InputError, match="System role not supported"):
        turns.render(TALK, "Be brief.")
    with pytest.raises(InputError, match=r"chat template of .* cannot be used: "):
        Turns(folder(tmp_path / "b", "{% if %}"), Default()).render(TALK)
    # The sandbox: a template is untrusted and must not reach Python.
    reaching = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(InputError, match="cannot be used"):
        Turns(folder(tmp_path / "c", reaching), Default()).render(TALK)


def test_answers_are_those_of_the_target_alone_for_the_rendered_text(tmp_path: Path) -> None:
    # `generate` applies no style here, so it can be given the rendered conversation.
    made, plain = folder(tmp_path / "a", CHATML), folder(tmp_path / "b")
    talking, alone = SpecLLM.load(made, drafter="prompt_lookup"), SpecLLM.load(plain, drafter="none")
    for sampling in ({"temperature": 0.0}, {"sampler": "coupled", "seed": 3}):
        found = talking.chat(TALK, max_new_tokens=20, **sampling)
        expected = alone.generate(talking.codec.turns.render(TALK), max_new_tokens=20, **sampling)
        assert found.token_ids == expected.token_ids and found.prompt == "and?"
        assert "".join(talking.chat(TALK, max_new_tokens=20, stream=True, **sampling)) == found.text


def test_the_command_keeps_the_history_and_saves_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made, file = folder(tmp_path / "a", CHATML, block_size=1024), tmp_path / "talk.json"
    text = f"one\n\n//two\n/save {file}\n/reset\none\n/quit\nnever read\n"
    args = ["--checkpoint_dir", made, "--max_new_tokens", 12, "--temperature", 0]
    code, out, err = chat(monkeypatch, capsys, text, *args)
    assert code == 0, err
    messages = json.loads(file.read_text())["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2
    assert [messages[0]["content"], messages[2]["content"]] == ["one", "/two"]
    llm = SpecLLM.load(made, drafter="none")
    answers = [llm.chat(messages[:n], max_new_tokens=12, temperature=0.0).text for n in (1, 3)]
    assert [messages[1]["content"], messages[3]["content"]] == answers
    assert out == f"{answers[0]}\n{answers[1]}\n{answers[0]}\n"
    assert "chat template" in err and "Saved 4 messages" in err and "max_new_tokens = 12" in err


def test_an_error_is_a_sentence_and_the_chat_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made, there = folder(tmp_path / "a", block_size=64), tmp_path / "there.json"
    there.write_text("mine")
    text = f"/rest\n/save\n/save {there}\n/save {tmp_path}/no/a.json\n{'long ' * 20}\nshort\n/help\n"
    code, out, err = chat(monkeypatch, capsys, text, "--checkpoint_dir", made, "--temperature", 0)
    assert code == 1
    for said in ("did you mean /reset?", "/save needs", "already exists", "No such file", "block_size is 64", "/quit"):
        assert said in err
    assert there.read_text() == "mine" and list(tmp_path.glob(".there*")) == []
    # As many tokens as there is room for: the tokenizer has one for each byte.
    alone = SpecLLM.load(made, drafter="none").generate("short", max_new_tokens=64 - 5, temperature=0.0)
    assert out == f"{alone.text}\n"


def test_lines_join_to_one_prompt_with_multiline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    text = f"a\n/b\n!submit\n/save {file}\nlast\n"
    args = ["--checkpoint_dir", folder(tmp_path / "a"), "--multiline", "--max_new_tokens", 4]
    assert chat(monkeypatch, capsys, text, *args)[0] == 0
    assert json.loads(file.read_text())["messages"][0]["content"] == "a\n/b"


def test_turns_that_were_read_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = SpecLLM.load(folder(tmp_path / "a", block_size=2048), drafter="none")
    read: list[int] = []
    prefill = type(llm.placed.model).prefill

    def counted(self: Any, idx: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        read.append(idx.size(1))
        return prefill(self, idx, *args, **kwargs)

    monkeypatch.setattr(type(llm.placed.model), "prefill", counted)
    settings = GenerateConfig(max_new_tokens=4, temperature=0.0, seed=1)
    talk = _Chat(llm, settings, None, str, False)
    talk._answer("a" * 1200)
    first = sum(read)
    assert first >= 1200
    read.clear()
    talk._answer("b")
    assert 0 < sum(read) < 600, f"{sum(read)} of {first} tokens were read again"


def test_a_saved_file_is_complete_and_replaces_no_other(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    save(file, [{"role": "user", "content": "é\ud800"}])
    with pytest.raises(InputError, match="already exists"):
        save(file, [])
    assert "é" in file.read_bytes().decode("utf-8", errors="surrogatepass")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    made = folder(tmp_path / "a", block_size=100_000)
    command = [sys.executable, "-m", "litspec", "chat", "--checkpoint_dir", str(made), "--drafter", "none"]
    command += ["--max_new_tokens", "90000", "--min_new_tokens", "90000", "--precision", "32-true"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"abc\n")
        seen = child.stdout.read(20)  # it answers
        assert seen
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(f"/save {file}\n/quit\n".encode(), timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0, err.decode()
    assert b"Interrupted." in err
    messages = json.loads(file.read_text())["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant"] and messages[1]["content"]
