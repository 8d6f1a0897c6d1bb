from __future__ import annotations

import io
import json
import re
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console

import paceline
from paceline.cli.compare import show_comparison
from paceline.cli.console import harmless
from paceline.cli.options import ModelOptions
from tiny import byte_tokenizer, small_llama

PROMPT = "one two three one two three one two"


@pytest.fixture(scope="module")
def llm(tiny_llama, tiny_tokenizer):
    return paceline.load(tiny_llama, tokenizer=tiny_tokenizer)


@pytest.fixture(scope="module")
def other_tokenizer_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "other"
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    small_llama().float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch):
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return give


# -- what it prints ------------------------------------------------------------------------------------------------
def test_text_goes_to_stdout_and_statistics_to_stderr(run, tiny_model_dir, llm):
    code, out, err = run("generate", PROMPT, "-m", tiny_model_dir, "-n", 20)
    assert code == 0
    assert out.removesuffix("\n") == llm.generate(PROMPT, max_new_tokens=20).text.removesuffix("\n")
    assert re.fullmatch(r"20 tokens · [\d.]+ tokens/s · tau [\d.]+ · .*prefill .*verify .*\n", err)
    assert "\x1b" not in out + err


def test_colour_adds_nothing_but_colour(run, tiny_model_dir, llm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = run("generate", PROMPT, "-m", tiny_model_dir, "-n", 150, "--colour").out
    assert "\x1b[36m" in out
    text = harmless(llm.generate(PROMPT, max_new_tokens=150).text)
    assert re.sub(r"\x1b\[[\d;]*m", "", out).rstrip("\n") == text.rstrip("\n")


def test_json(run, tiny_model_dir, llm):
    code, out, err = run(
        "generate", PROMPT, "-m", tiny_model_dir, "-n", 20, "--drafter", "prompt-lookup:ngram=2", "--json"
    )
    told, want = json.loads(out), llm.generate(PROMPT, max_new_tokens=20)
    assert (code, err) == (0, "")
    assert (told["text"], told["tokens"], told["finish_reason"]) == (want.text, want.tokens, "length")
    assert told["method"] == "prompt-lookup:ngram=2+fixed:k=10"
    assert len(told["provenance"]) == told["stats"]["tokens"] == 20
    assert told["provenance"].count("prompt-lookup") == told["stats"]["accepted"]


@pytest.mark.parametrize(
    "words", [("--raw",), ("--system", "be kind"), ("--policy", "fixed:k=0"), ("--seed", 3, "-t", 1)]
)
def test_options_reach_the_library(run, tiny_model_dir, llm, words):
    """Each option gives what the same call from Python gives, and not what leaving it out gives."""
    kinds = {"--raw": {"chat": False}, "--seed": {"seed": 3, "temperature": 1.0}}
    prompt = [{"role": "system", "content": "be kind"}, {"role": "user", "content": PROMPT}]
    want = llm.method("prompt-lookup", "fixed:k=0" if "--policy" in words else None).generate(
        prompt if "--system" in words else PROMPT, max_new_tokens=12, **kinds.get(words[0], {})
    )
    told = json.loads(run("generate", PROMPT, "-m", tiny_model_dir, "-n", 12, "--json", *words).out)
    assert told["tokens"] == want.tokens
    if "--policy" in words:  # how much else is drafted depends on measured costs
        assert told["stats"]["drafted"] == want.stats.drafted == 0


def test_sampling_options_reach_the_library(run, tiny_model_dir, llm):
    settings = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    settings |= {"temperature": 0.8, "seed": 1, "min_new_tokens": 4}
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    told = json.loads(run("generate", PROMPT, "-m", tiny_model_dir, "-n", 16, "--json", *words).out)
    assert told["tokens"] == llm.generate(PROMPT, max_new_tokens=16, **settings).tokens


def test_pieces_are_the_text(llm):
    whole = llm.generate(PROMPT, max_new_tokens=60).text
    stop = whole[20:22]
    for settings in ({}, {"stop": (stop,)}, {"eos": (llm.encode(whole[10], chat=False)[0],)}):
        [request] = llm.requests([PROMPT], max_new_tokens=60, **settings)
        told = [piece for _ in llm.engine.run([request]) for piece in request.read()]
        assert "".join(piece.text for piece in told) == llm.generate(PROMPT, max_new_tokens=60, **settings).text
        assert {piece.source for piece in told} <= {"target", "prompt-lookup"}


def test_stop_strings(run, tiny_model_dir, llm):
    whole = llm.generate(PROMPT, max_new_tokens=40).text
    stop = re.search(r"[!-~]", whole[5:]).group()
    told = json.loads(
        run("generate", PROMPT, "-m", tiny_model_dir, "-n", 40, "--stop", stop, "--stop", "zzz", "--json").out
    )
    assert told["finish_reason"] == "stop"
    assert told["text"] == whole[: whole.index(stop)]


def test_prompt_from_file_and_stdin(run, tiny_model_dir, tmp_path, stdin):
    words = ("-m", tiny_model_dir, "-n", 8, "--json")
    want = json.loads(run("generate", "naïve café", *words).out)["tokens"]
    file = tmp_path / "prompt.txt"
    file.write_text("naïve café", encoding="utf-8")
    assert json.loads(run("generate", "--file", file, *words).out)["tokens"] == want
    stdin("naïve café".encode())
    assert json.loads(run("generate", "--file", "-", *words).out)["tokens"] == want


# -- side by side --------------------------------------------------------------------------------------------------
def test_compare_in_a_pipe(run, tiny_model_dir):
    code, out, err = run("generate", PROMPT, "-m", tiny_model_dir, "-n", 20, "--compare")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "--- plain decoding" in out
    assert "--- auto+fixed:k=10" in out
    assert out.endswith("times the speed of plain decoding; the token ids are identical.\n")


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_compare_json(run, tiny_model_dir, temperature):
    words = ("-m", tiny_model_dir, "-n", 20, "--compare", "--json", "--temperature", temperature)
    told = json.loads(run("generate", PROMPT, *words).out)
    assert told["identical"]  # sampled too: prompt lookup is verified by sample-match, with one seed for both
    assert told["first_difference"] is None
    assert told["plain"]["tokens"] == told["paceline"]["tokens"]
    assert told["plain"]["stats"]["drafted"] == 0 < told["paceline"]["stats"]["drafted"]
    assert told["speedup"] > 0


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_compare_in_a_terminal(llm, width, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=12, _environ={"TERM": "xterm-256color"}
    )
    ids = llm.encode(PROMPT)
    show_comparison(console, llm, ids, {"max_new_tokens": 150, "seed": None}, PROMPT, "prompt-lookup")
    out = console.file.getvalue()
    assert "\x1b[36m" in out  # a drafted token's colour
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out).splitlines()
    assert max(map(cell_len, lines)) <= width
    titles = [line for line in lines[-60:] if "plain decoding" in line and "╭" in line]
    assert titles
    assert all(("prompt-lookup" in line) == (width >= 72) for line in titles)
    assert "the token ids are identical." in " ".join(" ".join(lines[-3:]).split())


def test_compare_as_a_picture(run, tiny_model_dir, tmp_path):
    picture = tmp_path / "compare.svg"
    code, out, _ = run("generate", PROMPT, "-m", tiny_model_dir, "-n", 20, "--compare", "--svg", picture)
    drawn = picture.read_text()
    assert code == 0
    assert "\x1b" not in out
    assert drawn.startswith("<svg")
    assert "http" not in drawn.replace("http://www.w3.org", "").replace("https://www.textualize.io", "")
    for part in ("prompt", "plain", "decoding", "identical."):
        assert part in drawn
    failed = run("generate", PROMPT, "-m", tiny_model_dir, "--svg", tmp_path / "none.svg")
    assert (failed.code, len(failed.err.splitlines())) == (1, 1)
    assert "give --compare" in failed.err


def test_a_picture_that_cannot_be_written_is_refused_before_the_model_is_loaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr(ModelOptions, "llm", lambda *_: pytest.fail("the model was loaded"))
    refused(run("generate", PROMPT, "--compare", "--svg", tmp_path), 2, "--svg", f"{tmp_path} is a folder")


def test_no_color_means_no_escapes(llm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), force_terminal=True, highlight=False, width=80)
    show_comparison(console, llm, llm.encode(PROMPT), {"max_new_tokens": 5, "seed": None}, PROMPT, "prompt-lookup")
    assert "\x1b" not in console.file.getvalue()


# -- what is refused -----------------------------------------------------------------------------------------------
def refused(result, code, *parts):
    """One line, that says what is wrong."""
    assert result.code == code
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    for part in parts:
        assert part in result.err


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ((), 1, "give a prompt"),
        (("",), 1, "the prompt is empty"),
        ((" \n ",), 1, "the prompt is empty"),
        (("hello", "--file", "x"), 1, "not both"),
        (("bad \udcff byte",), 1, "not valid UTF-8"),
        (("hello", "--raw", "--system", "x"), 1, "--raw"),
        (("hello", "--max-new-tokens", 0), 2, "--max-new-tokens"),
        (("hello", "--max-new-tokens", -3), 2, "--max-new-tokens"),
        (("hello", "--max-new-tokens", "many"), 2, "--max-new-tokens"),
        (("hello", "--temperature", -0.5), 2, "--temperature"),
        (("hello", "--temperature", "nan"), 2, "temperature"),
        (("hello", "--top-p", 0), 1, "top_p"),
        (("hello", "--min-p", 2), 1, "min_p"),
        (("hello", "--repetition-penalty", 0), 1, "repetition_penalty"),
        (("hello", "--min-new-tokens", 200), 1, "min_new_tokens"),
        (("hello", "--stop", ""), 1, "stop string"),
        (("hello", "--drafter", "promt-lookup"), 1, "did you mean 'prompt-lookup'?"),
        (("hello", "--drafter", "prompt-lookup:n=3"), 1, "its options are ngram"),
        (("hello", "--drafter", "prompt-lookup:ngram=x"), 1, "must be int"),
        (("hello", "--drafter", "prompt-lookup:ngram=0"), 1, "ngram"),
        (("hello", "--drafter", "prompt-lookup+adaedle"), 1, "unknown policy"),
        (("hello", "--policy", "fixd"), 1, "did you mean 'fixed'?"),
        (("hello", "--policy", "fixed:k=-1"), 1, "k must be >= 0"),
        (("hello", "--drafter", "draft-model"), 1, "draft-model:model="),
        (("hello", "--verifier", "x"), 2, "--verifier"),
        (("hello", "--dtype", "int4"), 2, "--dtype"),
        (("hello", "--device", "abacus"), 1, "abacus"),
        (("hello", "--tier", "x"), 1, "unknown tier 'x'"),
        (("hello", "--tier", "reference", "--exact"), 1, "the reference tier cannot be exact here"),
        (
            ("hello", "--dtype", "bfloat16", "--tier", "torch", "--exact"),
            1,
            "the torch tier cannot be exact here (bfloat16 on cpu",
        ),
        (("hello", "--nonsense"), 2, "--nonsense"),
    ],
)
def test_wrong_options(run, tiny_model_dir, words, code, part):
    refused(run("generate", *words, "-m", tiny_model_dir), code, part)


def test_prompt_longer_than_the_context(run, tiny_model_dir):
    refused(run("generate", "x" * 300, "-m", tiny_model_dir), 1, "context of 256 tokens")
    refused(run("generate", "x" * 20, "-m", tiny_model_dir, "-n", 240), 1, "240 new tokens")


def test_unknown_model(run, tmp_path):
    refused(run("generate", "hello", "-m", tmp_path / "nothing"), 1, "nothing")


def test_folder_that_is_no_model(run, tmp_path):
    refused(run("generate", "hello", "-m", tmp_path), 1, str(tmp_path))


def test_draft_model_with_another_tokenizer(run, tiny_model_dir, other_tokenizer_dir, caplog):
    words = ("generate", "hello", "-m", tiny_model_dir, "-n", 8)
    got = run(*words, "-d", f"draft-model:model={other_tokenizer_dir}", "-p", "fixed:k=2")
    assert got.out == run(*words, "-d", "none").out
    assert "has another tokenizer: it can draft" in caplog.text


def test_prompt_files_that_cannot_be_read(run, tmp_path, stdin):
    latin = tmp_path / "latin1.txt"
    latin.write_bytes("naïve".encode("latin-1"))
    refused(run("generate", "--file", latin), 1, "latin1.txt is not UTF-8 text (byte 2)")
    refused(run("generate", "--file", tmp_path / "missing"), 1, "missing", "No such file")
    refused(run("generate", "--file", tmp_path), 1, "directory")
    stdin(b"\xff\xfe")
    refused(run("generate", "--file", "-"), 1, "not UTF-8")
    (tmp_path / "empty").write_bytes(b"")
    refused(run("generate", "--file", tmp_path / "empty"), 1, "the prompt is empty")


def test_a_prediction_changes_nothing_but_the_rounds(run, tiny_model_dir, tmp_path):
    words = ("generate", "abc", "-m", tiny_model_dir, "-n", 24, "--json", "-d", "none", "-p", "fixed:k=6")
    plain = json.loads(run(*words).out)
    file = tmp_path / "prediction.txt"
    file.write_text(plain["text"])
    got = json.loads(run(*words, "--prediction", file).out)
    assert got["tokens"] == plain["tokens"]
    code, _, err = run("generate", "abc", "--compare", "--prediction", file)
    assert code == 1
    assert "--prediction" in err
    file.write_text(" ")
    refused(run("generate", "abc", "--prediction", file), 1, "the prediction is empty")
    file.write_bytes(b"\xff")
    refused(run("generate", "abc", "--prediction", file), 1, "is not UTF-8")
    refused(run("generate", "abc", "--prediction", tmp_path / "none"), 1, "cannot read the prediction from")
    refused(run("generate", "abc", "--prediction", ""), 1, "cannot read the prediction from a file without a name")


def test_what_the_output_must_match(run, tiny_model_dir, tmp_path):
    words = ("generate", "abc", "-m", tiny_model_dir, "-n", 24, "--json", "-d", "none")
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["abc"]}')
    grammar.write_text('start: "<" /[ab]{3}/ ">"')
    assert json.loads(run(*words, "--json-schema", schema).out)["text"] == '"abc"'
    assert re.fullmatch("<[ab]{3}>", json.loads(run(*words, "--grammar", grammar).out)["text"])
    for wrong in (("--json-schema", grammar), ("--grammar", tmp_path / "none"), ("--grammar", schema)):
        code, _, err = run(*words, *wrong)
        assert code == 1
        assert "grammar" in err or "must match" in err
        assert "Errno" not in err
    refused(run(*words, "--grammar", tmp_path / "none"), 1, f"{tmp_path / 'none'}: No such file")
    for text, part in (("[" * 100_000, "nested too deeply"), ("9" * 5000, "too many digits"), ("{", "is not JSON")):
        schema.write_text(text)
        refused(run(*words, "--json-schema", schema), 1, part)
    schema.write_bytes(b"\xff")
    refused(run(*words, "--json-schema", schema), 1, "is not UTF-8 text")


def test_a_template_that_refuses(run, tmp_path):
    small_llama().float().save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role here') }}"
    tokenizer.save_pretrained(tmp_path)
    code, out, err = run("generate", "hi", "--system", "x", "-m", tmp_path, "--tier", "reference")
    assert (code, out) == (1, "")
    assert "the chat template refuses these messages: no system role here" in err


def test_comparison_drafts_what_a_grammar_forces(run, tiny_model_dir, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"const": "aaaaaaaaaaaa"}')
    words = ("generate", "x", "-m", tiny_model_dir, "--compare", "--json")
    assert run(*words, "--min-new-tokens", 9, "-n", 12).code == 0  # more than those of its warm-up
    out = run(*words, "--json-schema", schema).out
    assert "grammar" in json.loads(out)["paceline"]["provenance"]


def test_a_schema_that_is_none(run, tiny_model_dir, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text("null")
    code, _, err = run("generate", "x", "-m", tiny_model_dir, "--json-schema", schema)
    assert code == 1
    assert "is no JSON schema" in err
